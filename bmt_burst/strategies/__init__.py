"""Strategies: who computes which tiles with what brought from where. One strategy a file or folder.

ring         queries stay, keys and values come by; in the backward what is cheaper travels
             (BurstAttention)
all-gather   the ring with all of a host's keys and values at once (arXiv 2407.21783)
ulysses      every rank gets whole sequences of some heads (arXiv 2309.14509)
usp          ulysses within hosts, the ring between them (arXiv 2405.07719)
plain-ring   the ring without overlap, to be read before it; "auto" never takes it

The contract is `Strategy` and `Plan` below. A strategy knows masks, layouts, kernels and transports
by their contracts only; what they share is in `compute`. To add one: write `strategies/NAME.py`
with a subclass of Strategy, list it in `_STRATEGIES`.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import Kernel
from ..ranks.rings import Rings
from ..scores import Scores, Term, is_one_row
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec

_STRATEGIES = {
    "ring": "ring.Ring",
    "all-gather": "all_gather.AllGather",
    "ulysses": "ulysses.Ulysses",
    "usp": "ulysses.USP",
    "plain-ring": "plain_ring.PlainRing",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes and dtypes of q (B, S, H, D) and k, v (B, S, G, D); `partial` is the dtype of the
    kernel's gradients.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    partial: torch.dtype


@dataclass(frozen=True)
class Problem:
    """A call of attention, as the ranks agreed on it: the same on every rank.

    inner, outer  ranks of a host, and hosts, as the rings are
    backward      "q", "kv" or "auto": what travels in a ring's backward
    send_out      where queries travel, let out itself do so instead of delta = rowsum(out * dout)
    group_bytes   most bytes of a ring's travelling blocks that come in together, if a single one is
                  not larger
    scores        which row of a bias's table each pair adds to its scores, if any; the mask is
                  theirs
    biased_kernel for pairs that are in no area of one row, where there are scores
    """

    mask: Mask
    layout: Layout
    spec: Spec
    kernel: Kernel
    sizes: Sizes
    inner: int
    outer: int
    backward: str = "auto"
    send_out: bool = False
    group_bytes: int = 5 << 26
    scores: Scores | None = None
    biased_kernel: Kernel | None = None

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """The mask in parts, each with the row of the bias's table that its pairs have; None: each
        its own, or none.

        The gradient of such a row is found for kv heads (see `compute`), so they are made use of
        where these are as many as query heads.
        """
        if self.scores is None or self.sizes.heads != self.sizes.kv_heads:
            return (Term(None, self.mask),)
        return self.scores.terms

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the table that parts of the mask have as a whole."""
        return tuple(
            term.row for term in self.terms if term.row is not None and is_one_row(term.row)
        )

    @property
    def takes_delta(self) -> bool:
        """Whether all kernels can do with delta = rowsum(out * dout) in place of out, and may."""
        kernels = [kernel for kernel in (self.kernel, self.biased_kernel) if kernel]
        return not self.send_out and all(kernel.takes_delta for kernel in kernels)

    @property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most."""
        return max(self.layout.length(rank) for rank in (0, self.layout.size - 1))


class Plan(ABC):
    """What one rank does in a call and its backward. Made from the problem alone, without a word
    with other ranks.
    """

    @abstractmethod
    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        """Lets the transport prepare for what will land, whatever the mask; all ranks call it
        alike.
        """

    @abstractmethod
    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's out (B, S, H, D) in q's dtype, lse (B, H, S), fp32 (fp64 for fp64 inputs),
        and with the table of a bias (R, H) in lse's dtype what the backward needs beside them.

        Queries that see nothing yield 0 and -inf. Nothing is written to the inputs.
        """

    @abstractmethod
    def backward(
        self,
        rings: Rings,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        table: Tensor | None = None,
        row_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv of this rank's tokens, in the inputs' dtype, and this rank's share of the
        table's gradient.
        """


class Strategy(ABC):
    """A way to compute attention over ranks.

    automatic  whether "auto" may take it
    """

    name: str
    automatic: bool = True

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None:
        """Why this strategy cannot do a problem, alike on every rank; None if it can."""

    @abstractmethod
    def plan(self, problem: Problem, rank: int) -> Plan:
        """What `rank` does. Pure: it depends on nothing else, and costs a rank no more than its own
        part.
        """


def names() -> list[str]:
    """All strategies; "auto" takes the first automatic one that can."""
    return list(_STRATEGIES)


@functools.cache
def load(name: str) -> Strategy:
    """The strategy called `name`."""
    module, _, strategy = _STRATEGIES[name].rpartition(".")
    loaded: Strategy = getattr(importlib.import_module(f"{__name__}.{module}"), strategy)()
    return loaded


def choose(name: str, problem: Problem) -> Strategy:
    """The strategy asked for, or for "auto" the first that can. Raises ValueError with the reasons
    if none can.
    """
    refusals = []
    for candidate in names() if name == "auto" else [name]:
        strategy = load(candidate)
        if name == "auto" and not strategy.automatic:
            continue
        if (reason := strategy.refuses(problem)) is None:
            return strategy
        refusals.append(f"strategy {candidate!r}: {reason}")
    raise ValueError("; ".join(refusals))
