"""Errors that tests expect, as text, and calls of functions that raise them."""

from __future__ import annotations

import builtins
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad


def refusal(text: str):
    """Return a context in which the error must be raised, "TypeError: a pattern of its message"."""
    kind, _, pattern = text.partition(": ")
    return pytest.raises(getattr(builtins, kind), match=pattern)


def refusal_of_rank(wrong: int, rank: int, text: str):
    """Return a context in which `rank` must raise the error of the rank that is wrong.

    The others raise a ValueError that names the rank and its error.
    """
    if rank == wrong:
        return refusal(text)
    kind, _, pattern = text.partition(": ")
    return refusal(f"ValueError: rank {wrong} of the group failed before .*: {kind}: .*{pattern}")


def refused_line(capsys, program: Callable[[list[str]], object], *arguments: object) -> str:
    """Return the one line with which a program, such as the `main` of a script, refuses its
    arguments.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        program([*map(str, arguments)])
    assert stopped.value.code == 2
    [printed] = capsys.readouterr().err.splitlines()
    return printed


# ways in which torch calls a function that knows none of them, and the errors of one called {}
TRANSFORMS = {
    "grad": "{} cannot be transformed by torch.func or vmap",
    "vmap": "{} cannot be transformed by torch.func or vmap",
    "forward mode": "{} has no forward mode",
    "batched gradients": "the backward of {} cannot be transformed",
}


def transform(kind: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Call a function in one of these ways."""
    if kind == "grad":
        torch.func.grad(lambda x: function(x).sum())(x)
    elif kind == "vmap":
        torch.vmap(function)(x.unsqueeze(0))
    elif kind == "forward mode":
        with forward_ad.dual_level():
            function(forward_ad.make_dual(x, x))
    else:
        out = function(x.requires_grad_())
        torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)
