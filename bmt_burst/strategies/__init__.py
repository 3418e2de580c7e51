"""Strategies: who computes which tiles with which tokens from where. One file or folder each.

ring         queries stay, keys and values are sent; a backward sends whichever side is cheaper
             (BurstAttention), and a forward too if keys are other tokens than queries
all-gather   the ring with all of a host's keys and values in one stage (arXiv 2407.21783)
ulysses      each rank computes some heads of whole sequences (arXiv 2309.14509)
usp          ulysses within hosts, the ring between them (arXiv 2405.07719)
one-call     gathers keys and values first, and computes without partial results
plain-ring   the ring without overlap, to be read first

`choose` says which of them "auto" takes. The contract is `Problem`, `Strategy` and `Plan` below.
`compute` is what strategies share.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.registry import Registry
from ..kernels import Kernel
from ..ranks.rings import Rings
from ..sequence.gathered_calls import GatheredCall
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec
from .compute import Attention, AttentionGradient, Keys, QueryGradients, Tensors

logger = logging.getLogger("bmt_burst")

GROUP_BYTES = 5 << 26  # by default

_STRATEGIES: Registry[Strategy] = Registry(
    __name__,
    {
        "ring": "ring:Ring",
        "all-gather": "ring:AllGather",
        "ulysses": "ulysses:Ulysses",
        "usp": "ulysses:USP",
        "one-call": "one_call:OneCall",
        "plain-ring": "plain_ring:PlainRing",
    },
)
load, names = _STRATEGIES.load, _STRATEGIES.names
_SHORT = 0.35e12  # operations of a rank's forward, below which "auto" takes one-call
_FEW_TOKENS = 1 << 13  # of a rank: with more, gathering all takes longer than it saves
_logged: set[str] = set()  # the strategies whose choice was logged


class MaskPart(NamedTuple):
    """Some of the visible pairs. Kernel calls have the pairs of one part.

    label      tells a `Scoring` which part it is
    most_gaps  as `kernel_calls` takes it
    """

    mask: Mask
    label: Any = None
    most_gaps: float = 0.0


class Scoring:
    """The computation of a call's pairs: that of the problem's kernel. An extension that computes
    them in another way is a subclass of it, and of `Attention` and `AttentionGradient`.

    A scoring is immutable and hashable, and equal on all ranks. Its `inputs` are tensors besides q,
    k and v that all ranks have, which it may find gradients for.

    name           what messages call it
    prefers_delta  whether a backward should compute delta first
    host_work      how many times the host's work of dense attention calls need: short ones are not
                   worth being cut further
    """

    name: str = "dense attention"
    prefers_delta: bool = False
    host_work: int = 1

    def parts(self, problem: Problem) -> tuple[MaskPart, ...]:
        """Return the visible pairs in parts, disjoint and complete."""
        return (MaskPart(problem.mask),)

    def refine(
        self, calls: list[GatheredCall], sides: Callable[[], tuple[Tensor, Tensor]]
    ) -> list[GatheredCall]:
        """Return the calls, with labels that may tell more.

        sides  returns the positions of queries (S,) and of keys (T,), as they lie in memory
        """
        return calls

    def select_heads(self, inputs: Tensors, heads: slice) -> Tensors:
        """Return views of the inputs, or of their gradients, for some query heads."""
        return inputs

    def forward(self, problem: Problem, q: Tensor, inputs: Tensors) -> Attention:
        """Begin a forward with queries q (B, S, H, D)."""
        return Attention(problem.kernel, problem.spec)

    def backward(
        self, problem: Problem, queries: QueryGradients, inputs: Tensors, kept: Tensors
    ) -> AttentionGradient:
        """Begin a backward. `kept` are the `Attention.kept` of its forward."""
        return AttentionGradient(problem.kernel, problem.spec)


DENSE = Scoring()


@dataclass(frozen=True)
class Sizes:
    """The sizes and dtypes of q (B, S, H, D) and k, v (B, T, G, D).

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
    """A call of attention as all ranks agreed on it.

    layout         that of the queries
    inner, outer   the number of ranks of a host, and of hosts
    forward        the side that a ring's forward sends: "q", "kv" or "auto"
    backward       the side that its backward sends
    group_bytes    the most bytes of a ring's blocks in one stage, unless a single block is larger
    scoring        how pairs are computed: by the kernel, unless an extension computes them
    kv_layout      the layout of the keys, or None if keys are the same tokens as queries
    """

    mask: Mask
    layout: Layout
    spec: Spec
    kernel: Kernel
    sizes: Sizes
    inner: int
    outer: int
    forward: str = "auto"
    backward: str = "auto"
    group_bytes: int = GROUP_BYTES
    scoring: Scoring = DENSE
    kv_layout: Layout | None = None

    @functools.cached_property
    def parts(self) -> tuple[MaskPart, ...]:
        """The visible pairs in parts, which kernel calls do not mix."""
        return self.scoring.parts(self)

    @functools.cached_property
    def most_queries(self) -> int:
        """The number of queries of the longest shard."""
        return max(map(self.layout.length, range(self.layout.size)))

    @functools.cached_property
    def most_keys(self) -> int:
        """The number of keys of the longest shard."""
        layout = self.kv_layout or self.layout
        return max(map(layout.length, range(layout.size)))


class Plan(ABC):
    """The part of one rank in a call and its backward. It follows from the problem alone.

    takes_inputs  whether its forward gets the inputs of an extension
    """

    takes_inputs: bool = True

    @abstractmethod
    def lane_bytes(self, with_backward: bool) -> dict[str, int]:
        """Return, for each lane of `bmt_burst.transport.LANES`, the most bytes that may land at
        once in any call of the same sizes, whatever its mask. It is the same on all ranks.
        """

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        """Reserve the transport's memory for what this plan will receive."""
        rings.reserve(self.lane_bytes(with_backward), device)

    @abstractmethod
    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Compute the attention of this rank's queries.

        Return out (B, S, H, D) in q's dtype, lse (B, H, S) in fp32 (fp64 for fp64 inputs), and what
        the backward needs in addition. `inputs` are those of an extension.

        Queries that see nothing yield 0 and -inf. Inputs are not written to. The caller may write
        to the results if the kernel `writes_new_memory`.
        """

    @abstractmethod
    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Return dq, dk and dv of this rank's tokens, in the inputs' dtype, and this rank's shares
        of the gradients of the other inputs. If `keys` have sums, add to these and return them.

        Out and lse of `queries` are those of the forward. With attention sinks, they include the
        sinks. `kept` is what the forward returned for its backward.
        """


class Strategy(ABC):
    """A way to compute attention over ranks.

    takes_hosts      whether it supports a double group
    takes_kv_layout  whether keys may be other tokens than queries, or lie elsewhere
    takes_scorings   whether it supports pairs that an extension computes
    """

    name: str
    takes_hosts: bool = True
    takes_kv_layout: bool = True
    takes_scorings: bool = True

    def refuses(self, problem: Problem) -> str | None:
        """Return why this strategy cannot solve a problem, or None if it can."""
        if problem.outer > 1 and not self.takes_hosts:
            sizes = f"{problem.outer} x {problem.inner}"
            return f"expected a single group, got a double_group of {sizes}"
        if problem.kv_layout is not None and not self.takes_kv_layout:
            return (
                "expected queries and keys of one length and one layout, got "
                f"{problem.mask.seq_len} queries ({problem.layout.name}) and "
                f"{problem.mask.kv_len} keys ({problem.kv_layout.name}): pass strategy='auto'"
            )
        if problem.scoring is not DENSE and not self.takes_scorings:
            return f"it supports dense attention only, not {problem.scoring.name}"
        return None

    @abstractmethod
    def plan(self, problem: Problem, rank: int) -> Plan:
        """Return the part of `rank`. Making it needs no other rank."""


def choose(name: str, problem: Problem) -> Strategy:
    """Return the strategy called `name`. For "auto" that is one-call for short work, if it does not
    refuse the problem and needs no more than `group_bytes`. Otherwise it is the ring.

    Work is short if a rank has at most 8K tokens and its forward, on average, less than 0.35
    TFLOP. Kernel launches and the host take longer than an exchange there. 0.35 was measured on two
    H200, and on one that computed a rank's part: rows of "ring" and "one-call" in
    bench/results/attention-2-nvidia-h200-short*.jsonl and one-rank-1-*.jsonl.

    The answer is the same on all ranks, and with and without gradients. It is logged once. Raises
    ValueError with the reason if a strategy that was asked for by name refuses the problem.
    """
    if name != "auto":
        strategy = load(name)
        if reason := strategy.refuses(problem):
            raise ValueError(f"strategy {name!r}: {reason}")
        return strategy
    one_call, sizes, size = load("one-call"), problem.sizes, problem.layout.size
    pairs = problem.mask.area * sizes.batch * sizes.heads / size  # of a rank, on average
    work = 4 * pairs * sizes.head_size  # two products for each pair
    is_short = work < _SHORT and max(problem.most_queries, problem.most_keys) <= _FEW_TOKENS
    fits = _count_gathered_bytes(problem) <= problem.group_bytes
    takes_one_call = size > 1 and is_short and fits and one_call.refuses(problem) is None
    chosen = one_call if takes_one_call else load("ring")
    if size > 1 and chosen.name not in _logged:
        _logged.add(chosen.name)
        text = "strategy='auto' took %r: a rank's forward has %.3f TFLOP"
        logger.info(text, chosen.name, work / 1e12)
    return chosen


def _count_gathered_bytes(problem: Problem) -> int:
    """Count the most bytes that land at once: two copies of keys and values, or of gradients."""
    sizes = problem.sizes
    tokens = 2 * problem.layout.size * problem.most_keys
    width = max(sizes.dtype.itemsize, sizes.partial.itemsize)
    return tokens * sizes.batch * 2 * sizes.kv_heads * sizes.head_size * width
