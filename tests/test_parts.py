"""Kinds of attention as any part of a sequence takes them: second runs, wrong kinds and tensors.

tests/conformance/test_extensions.py compares each kind in each part with its definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from bmt_burst import Cache, Chunks, InfLLMV2, Mask, SequenceParallel
from bmt_burst.extensions import find_kind
from bmt_burst.lightning.memory import Lightning
from bmt_burst.nn import find_part
from tests.test_chunks import on_ranks

HEADS, SIZE = 4, 8
CHOICE = InfLLMV2(8, 4, 2, 1, 16, 3, -1)


def run_states(chunks: Chunks, scale: float = 1.0, layers: tuple[int, ...] = (0, 1)) -> None:
    """Take a step of two lightning layers. The second run has scaled values and fewer layers."""
    kind, x = Lightning((0.1, 0.2)), torch.ones(1, 10, 2, 4, dtype=torch.float64)
    for chunk in chunks.forward():
        for layer in (0, 1):
            chunk.mix(layer, kind, x, x, x)
    for chunk in chunks.backward():
        q = x.clone().requires_grad_()
        sum(chunk.mix(layer, kind, q, x, x * scale).sum() for layer in layers).backward()


def test_wrong_second_runs_of_states_are_refused():
    for named, message in (
        ({"scale": 1.01}, "keys, values or states of chunk 1 differ from what the forward kept"),
        ({"layers": (0,)}, "chunk 2 was not computed by 1 of 2 layers, the first is layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run_states(Chunks(Mask.causal(30), 10, 2), **named)
    run_states(Chunks(Mask.causal(30), 10, 2))


def _parts(sp: SequenceParallel) -> Iterator:
    """Yield a part of each kind, of 16 tokens."""
    yield find_part(sp, None, Mask.causal(16 * sp.size))
    chunks = Chunks(Mask.causal(32 * sp.size), 16 * sp.size, 1, sp).forward()
    yield next(chunks)
    chunks.close()
    yield Cache(sp, 1, 16)


KINDS_AND_TENSORS = {
    # what rank 1 passes
    "a name": ("softmax", (), "such as layer.kind, got str"),
    "a class": (Lightning, (), "such as layer.kind, got Lightning"),
    "choices": (CHOICE, (), "such as layer.kind, got InfLLMV2"),
    "no sinks": (find_kind(None, {})[0], (5,), "sinks must be a torch.Tensor, got int"),
    "keys besides sinks": (
        find_kind(None, {})[0],
        (None, torch.ones(1), torch.ones(1)),
        "no tensors besides q, k, v and sinks, got 2 more",
    ),
    "sinks of states": (
        Lightning((0.1,) * HEADS),
        (torch.zeros(HEADS),),
        "lightning attention takes no tensors besides q, k and v, got 1 more",
    ),
    "no log_decay": (Lightning(None), (), "takes log_decay, for it has no slopes, besides q"),
    "growing states": (
        Lightning(None),
        (torch.full((1, 16, HEADS), 0.5),),
        "log_decay must be at most 0, got 0.5",
    ),
    "a log_decay of one head": (
        Lightning(None),
        (torch.zeros(1, 16, 1),),
        r"log_decay must be \(1, 16, 4\), one for each token and head, got shape \(1, 16, 1\)",
    ),
    "a query to choose by": (
        find_kind(None, {"sparse": dataclasses.replace(CHOICE, use_nope=True)})[0],
        (None, torch.ones(1, 16, HEADS, SIZE)),
        "choose_by must be a pair of queries and keys, got 1 items",
    ),
}


@pytest.mark.parametrize("case", KINDS_AND_TENSORS)
def test_wrong_kinds_and_tensors_are_refused_on_all_ranks(case):
    wrong, tensors, message = KINDS_AND_TENSORS[case]

    def work(sp):
        kind, _ = find_kind(None, {})
        for part in _parts(sp):
            given = (wrong, *torch.ones(3, 1, 16, HEADS, SIZE), *tensors)
            if sp.rank == 0:
                given = kind, *given[1:4]
            with pytest.raises((TypeError, ValueError), match=message):
                part.mix(0, *given)

    on_ranks(2, work)


def test_beams_and_drafts_of_states():
    """Rows are chosen in place, and nothing is taken back."""
    kind, x = Lightning((0.1, 0.2)), torch.randn(3, 7, 2, 4, dtype=torch.float64)
    cache, whole = Cache(None, 1, 9), Cache(None, 1, 9)
    cache.mix(0, kind, *(x[:, :6],) * 3)
    cache.select_rows([2, 0, 0])
    whole.mix(0, kind, *(x[[2, 0, 0], :6],) * 3)
    rest = (x[:, 6:],) * 3
    assert cache.mix(0, kind, *rest).equal(whole.mix(0, kind, *rest))
    with pytest.raises(ValueError, match="layer 0 cannot take tokens back: the state of lightning"):
        cache.crop(5)
    with pytest.raises(ValueError, match=r"expected rows of 0 to 2, got \[3\]"):
        cache.select_rows([3])
