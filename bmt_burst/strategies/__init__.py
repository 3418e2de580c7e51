"""Strategies: who computes which tiles with which tokens from where. One file or folder each.

ring         queries stay, keys and values are sent; a backward sends whichever side is cheaper
             (BurstAttention)
all-gather   the ring with all of a host's keys and values in one stage (arXiv 2407.21783)
ulysses      each rank computes some heads of whole sequences (arXiv 2309.14509)
usp          ulysses within hosts, the ring between them (arXiv 2405.07719)
one-call     gathers keys and values first, and computes without partial results
plain-ring   the ring without overlap, to be read first; "auto" never takes it

"auto" takes the one with the least predicted time of a forward and backward, if it is 5 % faster
than the ring, or 15 % with a bias. Without constants of the machine (`machine`) and its kernels,
with sparse attention, or with a bias of many documents it takes the ring.

The contract is `Strategy` and `Plan` below. A strategy knows masks, layouts, kernels and transports
only by their contracts. `compute` is what strategies share. To add a strategy, write
`strategies/NAME.py` with a subclass of Strategy and list it in `_STRATEGIES`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Kernel
from ..ranks.rings import Rings
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec
from .compute import DENSE, Part, Scoring
from .machine import BACKWARD, BIASED_TIMES, Machine

logger = logging.getLogger("bmt_burst")

GROUP_BYTES = 5 << 26  # by default

_STRATEGIES = {
    "ring": "ring.Ring",
    "all-gather": "all_gather.AllGather",
    "ulysses": "ulysses.Ulysses",
    "usp": "ulysses.USP",
    "one-call": "one_call.OneCall",
    "plain-ring": "plain_ring.PlainRing",
}
# Of the time, by which "auto" must expect another strategy to be faster. Where kernels take all of
# the time, predictions are up to 4 % off (tests/test_automatic.py).
_CLEARLY = 0.05
_CLEARLY_BIASED = 0.15  # with a bias, where predictions are up to 12 % off
_MOST_RANKS = 4  # whose times are predicted
_MOST_RUNS = 1 << 9  # of positions in a shard. With more, predictions of documents take seconds.
_MOST_SLICES = 1 << 8  # of a bias. With more, too.
_logged: set[str] = set()  # the strategies whose choice was logged


@dataclass(frozen=True)
class Sizes:
    """The sizes and dtypes of q (B, S, H, D) and k, v (B, S, G, D).

    `partial` is the dtype of the kernel's gradients.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    partial: torch.dtype


@dataclass(frozen=True)
class Problem:
    """A call of attention as the ranks agreed on it. It is identical on all ranks.

    inner, outer   the number of ranks of a host, and of hosts
    backward       the side that a ring's backward sends: "q", "kv" or "auto"
    send_out       whether a backward that sends queries sends out with them instead of
                   delta = rowsum(out * dout)
    group_bytes    the most bytes of a ring's blocks in one stage, unless a single block is larger
    scoring        how pairs are computed: by the kernel, unless an extension computes them
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
    group_bytes: int = GROUP_BYTES
    scoring: Scoring = DENSE

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The visible pairs in parts, which kernel calls do not mix."""
        return self.scoring.parts(self)

    @property
    def takes_delta(self) -> bool:
        """Whether kernels get delta = rowsum(out * dout) instead of out: all can take it, and
        `send_out` does not forbid it.
        """
        return not self.send_out and self.scoring.takes_delta(self)

    @functools.cached_property
    def most_tokens(self) -> int:
        """The number of tokens of the longest shard."""
        return max(map(self.layout.length, range(self.layout.size)))


class Saved(NamedTuple):
    """The tensors that a forward saves for its backward.

    q, k, v   its inputs
    out, lse  its results. With attention sinks, those that include the sinks.
    inputs    its other inputs, which an extension of attention has
    kept      what else the forward keeps
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    inputs: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()


class Plan(ABC):
    """The part of one rank in a call and its backward.

    A plan follows from the problem alone. Making it needs no other rank.
    """

    @abstractmethod
    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        """Reserve the transport's memory for what this plan will receive.

        Pass `rings.reserve`, for each lane of `bmt_burst.transport.LANES`, the most bytes that may
        land at once in any later call of the same sizes, whatever its mask. Call it even if that is
        0. All ranks pass the same numbers.
        """

    @abstractmethod
    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute the attention of this rank's queries.

        Return out (B, S, H, D) in q's dtype, lse (B, H, S) in fp32 (fp64 for fp64 inputs), and what
        the backward needs beside that. `inputs` are those of an extension.

        Queries that see nothing yield 0 and -inf. Inputs are not written to. The caller may write
        to the results if the kernel `writes_new_memory`.
        """

    @abstractmethod
    def backward(
        self, rings: Rings, dout: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Return dq, dk and dv of this rank's tokens, in the inputs' dtype, and this rank's shares
        of the gradients of the other inputs.
        """


class Strategy(ABC):
    """A way to compute attention over ranks.

    automatic  whether "auto" may take it where nothing is predicted
    """

    name: str
    automatic: bool = True

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None:
        """Return why this strategy cannot solve a problem, or None if it can.

        The answer is the same on all ranks.
        """

    @abstractmethod
    def plan(self, problem: Problem, rank: int) -> Plan:
        """Return the part of `rank`. It depends only on the arguments, and making it costs no more
        than this rank's part.
        """

    def predict(self, problem: Problem, machine: Machine) -> float | None:
        """Return the seconds of a forward and backward on the slowest rank, or None if "auto" is
        not to take this strategy: nothing is known, or more than group_bytes would land at once.

        The answer is the same on all ranks.
        """
        return None


def spread_ranks(size: int) -> list[int]:
    """Return a few ranks, with the first and the last, by which all are judged."""
    count = min(size, _MOST_RANKS)
    return [rank * (size - 1) // max(count - 1, 1) for rank in range(count)]


def names() -> list[str]:
    """List all strategies. Without predictions, "auto" takes the first automatic one that can solve
    a problem.
    """
    return list(_STRATEGIES)


@functools.cache
def load(name: str) -> Strategy:
    """Load the strategy called `name`."""
    module, _, strategy = _STRATEGIES[name].rpartition(".")
    loaded: Strategy = getattr(importlib.import_module(f"{__name__}.{module}"), strategy)()
    return loaded


def choose(name: str, problem: Problem, machine: Machine | None = None) -> Strategy:
    """Return the strategy called `name`, or for "auto" the fastest on this machine.

    Without the machine's constants for the problem's kernels, or with a choice of blocks, "auto"
    takes the first automatic strategy that can solve the problem. It takes another one if that one
    is predicted to be faster by 5 %, or 15 % with a bias. It logs each strategy when it first takes
    it, with the reason.

    The answer counts a forward and a backward, also where no gradient is needed. So a forward that
    checkpointing repeats has the same strategy, and the same bits.

    Raises ValueError with the reasons if no strategy can solve the problem.
    """
    first = _choose_first(name, problem)
    if name != "auto":
        return first
    if problem.layout.size == 1:
        return first
    chosen, why = _choose_fastest(first, problem, machine)
    if chosen.name not in _logged:
        _logged.add(chosen.name)
        logger.info("strategy='auto' took %r: %s", chosen.name, why)
    return chosen


def _choose_fastest(
    first: Strategy, problem: Problem, machine: Machine | None
) -> tuple[Strategy, str]:
    """Return the strategy that is predicted to be the fastest, and why. Ties are for the first."""
    if machine is None:
        return first, "nothing is known about this machine's speed"
    if problem.sparse:
        return first, "no speed is predicted for sparse attention"
    slices = [len(term.mask.slices) for term in problem.terms]
    if max(slices, default=0) > 1 and _count_runs(problem.layout) > _MOST_RUNS:
        return first, f"a {problem.layout.name} layout of documents takes long to predict"
    if problem.scores and sum(slices) > _MOST_SLICES:
        return first, "a bias of many documents takes long to predict"
    for kernel in filter(None, (problem.kernel, problem.biased_kernel)):
        if kernel.name != machine.kernel:
            return first, f"the kernel is {kernel.name!r}, speeds are known for {machine.kernel!r}"
    if problem.biased_kernel and problem.biased_kernel.name not in BIASED_TIMES:
        return first, f"nothing is known about a bias with the kernel {machine.kernel!r}"
    seconds = {first.name: first.predict(problem, machine)}
    if not _is_near_kernel(seconds[first.name], problem, machine):
        others = [name for name in names() if name != first.name]
        for strategy in map(load, others):
            if strategy.refuses(problem) is None:
                seconds[strategy.name] = strategy.predict(problem, machine)
    found = {name: time for name, time in seconds.items() if time is not None}
    best = min(found, key=lambda name: found[name], default=first.name)
    clearly = _CLEARLY_BIASED if problem.scores else _CLEARLY
    if first.name in found and found[best] > (1 - clearly) * found[first.name]:
        best = first.name
    text = ", ".join(f"{name} {1e3 * time:.2f} ms" for name, time in found.items())
    tokens, ranks = problem.mask.seq_len, problem.layout.size
    of = f"of {tokens} tokens over {ranks} ranks"
    return load(best), f"{text} are predicted for a forward and backward {of}"


def _count_runs(layout: Layout) -> int:
    """Return the most separate runs of positions in a shard."""
    return max(sum(len(x) if x.step > 1 else 1 for x in shard) for shard in layout.shards)


def _is_near_kernel(seconds: float | None, problem: Problem, machine: Machine) -> bool:
    """Whether a strategy is predicted to be as fast as if all ranks shared the work equally, in one
    kernel call each without a bias, and nothing was sent.
    """
    if seconds is None:
        return False
    sizes, rates, ranks = problem.sizes, machine.rates, problem.layout.size
    keys = (problem.mask.area + rates.call_keys * problem.mask.seq_len) / ranks
    work = 4 * sizes.batch * sizes.heads * sizes.head_size * keys
    backward = BACKWARD / (rates.backward_operations or rates.operations)
    least = work * (1 / rates.operations + backward)
    return seconds * (1 - _CLEARLY) <= least


def _choose_first(name: str, problem: Problem) -> Strategy:
    """Return the strategy called `name`, or for "auto" the first that can solve the problem."""
    refusals = []
    for candidate in names() if name == "auto" else [name]:
        strategy = load(candidate)
        if name == "auto" and not strategy.automatic:
            continue
        if (reason := strategy.refuses(problem)) is None:
            return strategy
        refusals.append(f"strategy {candidate!r}: {reason}")
    raise ValueError("; ".join(refusals))
