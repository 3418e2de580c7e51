"""Rehearsal of a run's steps: it finds the kernels that the run will need, and compiles some.

    python -m train.planning.rehearsal '{"heads": 32, ...}' SHARE SHARES $$

The last argument is the process that waits for it. They end together.

All calls of a few ranks are made with short sequences, and with peers that are only imagined. So
memory and time are small, and masks of all kinds are tried: one document, many, and documents that
are cut at any place. Calls launch nothing. FlashAttention-4's are noted by their `Kernel.variant`,
and Triton's by its own signatures. Then this process compiles its share of them onto disk.

`warming.py` runs several such processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_burst import InfLLMV2, Layout, Mask, kernels, strategies
from bmt_burst.blocks.documents import find_longest
from bmt_burst.kernels import Kernel
from bmt_burst.lightning import kernels as lightning_kernels
from bmt_burst.lightning.rates import find_rates
from bmt_burst.lightning.segments import Segments
from bmt_burst.memories.chunk_keys import find_keys
from bmt_burst.merging.merge import empty_lse
from bmt_burst.ranks.rings import Rings
from bmt_burst.sequence.layout import Chunked, Stacked
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from bmt_burst.strategies import GROUP_BYTES, Plan, Problem, Sizes
from bmt_burst.strategies.compute import Keys, QueryGradients
from bmt_burst.transport import ALONE, Messages, Ticket
from train.base.signals import die_with
from train.engine.adamw import Update

from bmt_burst.transport.imagined import ImaginedRing

_TOKENS = 1 << 12  # of a rank
_MOST_TOKENS = 1 << 15  # of a rank, for long windows: many processes share a GPU's memory
_FEW_TOKENS = 1 << 13  # of a rank, for which "auto" may take one-call as well as the ring
_CHUNKS = 3  # of a sequence of the rehearsal, at most
_FEW_QUERIES = 64  # of a chunk, in documents that begin in the chunk before it

KERNELS = (  # the modules of all Triton kernels of a run
    "bmt_burst.merging.fused",
    "bmt_burst.kernels.triton_blocks",
    "bmt_burst.blocks.tiles",
    "bmt_burst.blocks.triton_far",
    "bmt_burst.sparse.triton_choice",
    "bmt_burst.sparse.triton_decoding",
    "bmt_burst.fused.triton_passes",
    "train.engine.triton_adamw",
    "bmt_burst.lightning.triton_blocks",
    "bmt_burst.kernels.triton_few_queries",
)

Job = Callable[..., Any]
# a mask, the layout of its queries, and that of its keys if it is another one
Seen = tuple[Mask, Layout, Layout | None]


def settle_keys() -> None:
    """Compute the names of all kernels on disk, before the first launch. Each process of a run must
    call it.

    Triton hashes a kernel with those globals of its inner functions that it has seen before. So the
    names depend on the order in which a process computes them.
    """
    from triton import JITFunction

    for module in map(importlib.import_module, KERNELS):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key  # kept from now on


@dataclass(frozen=True)
class Rehearsal:
    """The facts of a run that its kernels depend on, in JSON's types.

    norms           the sizes of the vectors that blocks normalize
    gated           whether mixers have a gate
    lightning       the `flash` of lightning layers, or None without such layers
    layout          of TrainConfig, so it may be "auto"
    rows            the sequences that a rank computes at once
    inner_size      the ranks of a host, or of a group that shares heads
    windows         the different windows of layers
    sparse          the constants of InfLLMV2, or None
    documents       whether documents of a sequence are kept apart
    many_documents  whether a call may have hundreds of them
    chunks          the chunks in which a sequence is computed, 1 if it is computed as a whole
    engine          "bmtrain" or "torch"
    """

    norms: Sequence[int]
    gated: bool
    lightning: str | None
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    flash: str
    deterministic: bool
    strategy: str
    layout: str
    seq_len: int
    rows: int
    sp_size: int
    inner_size: int
    windows: Sequence[int | None]
    sparse: dict[str, Any] | None
    documents: bool
    many_documents: bool
    chunks: int
    engine: str

    @property
    def tokens(self) -> int:
        """The tokens of a sequence of the rehearsal."""
        bands = [window for window in self.windows if window is not None]
        if self.constants:
            bands.append(self.constants.window_size)
        # As in the run, a window may end inside of a range of a shard. Zigzag has two ranges.
        ranges, most = 2 * self.sp_size * min(self.chunks, _CHUNKS), _MOST_TOKENS * self.sp_size
        least = [max(2 * band, min(ranges * band * 3 // 2, most)) for band in bands]
        least.append(self._longest * 5 // 2)  # two such documents
        return min(self.seq_len, max(_TOKENS * self.sp_size, *least, 0))

    @property
    def spec(self) -> Spec:
        return Spec(self.head_size**-0.5, self.deterministic)

    def pick_kernel(self, device: torch.device) -> Kernel:
        """Return the kernel that computes the run's attention on such a device."""
        q, k = (
            torch.empty(
                1, 1, heads, self.head_size, dtype=getattr(torch, self.dtype), device=device
            )
            for heads in (self.heads, self.kv_heads)
        )
        return kernels.pick(self.flash, q, k, self.spec)

    @functools.cached_property
    def constants(self) -> InfLLMV2 | None:
        """The constants of sparse attention. Calls are sparse from the shortest document on in
        which queries choose blocks.
        """
        if self.sparse is None:
            return None
        sparse = InfLLMV2(**self.sparse)
        shortest = sparse.exact_tokens + sparse.block_size
        # the whole sequence decides for its chunks
        dense_len = min(sparse.dense_len, shortest) if self.chunks == 1 else -1
        return dataclasses.replace(sparse, dense_len=dense_len)

    @property
    def _longest(self) -> int:
        """The tokens of a document in which queries choose blocks. 0 without sparse attention."""
        return self.constants.exact_tokens + self.constants.block_size if self.constants else 0

    def rank_sample(self) -> list[int]:
        """Return the ranks of a sequence that are rehearsed: all, or the first and some others."""
        size = self.sp_size
        return sorted({0, 1 % size, size // 2, size - 1})

    @property
    def cut(self) -> Chunked:
        """The chunks of a sequence of the rehearsal."""
        name = "zigzag" if self.layout == "auto" else self.layout
        most = -(-self.tokens // min(self.chunks, _CHUNKS))
        return Layout.chunks(self.tokens, self.sp_size, most, name)

    def masks(self) -> Iterator[Seen]:
        """Yield masks of all kinds that the run's data may have, and their layouts."""
        masks = [Mask.causal(self.tokens)]
        if self.documents:
            masks = [Mask.documents(ends) for ends in self.examples()]
        rows: list[tuple[Mask, ...]] = [(mask,) for mask in masks]
        if self.rows > 1:
            rows += itertools.pairwise(masks)
        in_layers = self._in_window if self.chunks == 1 else self._in_chunks
        for window, of_rows in itertools.product(self.windows, rows):
            yield from map(_stack, in_layers(of_rows, window))

    def _in_window(self, masks: Sequence[Mask], window: int | None) -> Iterator[list[Seen]]:
        """Yield the call of rows with these masks in a layer with a window."""
        yield [(*self._lay(mask, window), None) for mask in masks]

    def _in_chunks(self, masks: Sequence[Mask], window: int | None) -> Iterator[list[Seen]]:
        """Yield the call of each chunk of rows with these masks in a layer with a window."""
        for keys in find_keys(tuple(masks), self.cut, 0, window):
            layout = keys.chunks.layouts[keys.number]
            kv_layout = None if keys.layout == layout else keys.layout
            yield [(mask, layout, kv_layout) for mask in keys.masks]

    def _lay(self, mask: Mask, window: int | None) -> tuple[Mask, Layout]:
        """Return the mask in a layer with a window, and its layout, which all layers share."""

        def within(window: int | None) -> Mask:
            return mask if window is None else mask.windowed(window)

        balanced = self.documents or any(self.windows)
        if self.layout == "auto" and balanced and self.sp_size > 1:
            work = within(min(self.windows, key=bool))  # as train.data.batches does
            if self.constants and not self.constants.is_dense(find_longest(mask)):
                work = self.constants.work_mask(work)
            layout = Layout.balanced(work, self.sp_size)
        else:
            name = "zigzag" if self.layout == "auto" else self.layout
            layout = Layout.named(name, mask.seq_len, self.sp_size)
        return within(window), layout

    def examples(self) -> Iterator[list[int]]:
        """Yield the ends of documents, from one to hundreds in a sequence."""
        chance, tokens = random.Random(0), self.tokens
        firsts = sorted({0, min(self._longest, tokens)})  # the length of a long document
        yield [0, tokens]
        for first, count in itertools.product(firsts, (2, 3, 5, 7, 9)):
            cuts = [first + (tokens - first) * i // count for i in range(count + 1)]
            yield sorted({0, *cuts})
        for first, count in itertools.product(firsts, (2, 3, 5, 9, 40) * 2):
            ends = sorted({0, first})
            while ends[-1] < tokens:
                length = 1 + int(chance.expovariate(count / tokens))
                ends.append(min(tokens, ends[-1] + length))
            yield ends
        for first in firsts if self.many_documents else ():
            yield sorted({0, *range(first or 4, tokens, 4), tokens})
        if self.chunks > 1:
            borders, piece = [end for _, end in self.cut.spans[:-1]], self.cut.layouts[0].length(0)
            for before in (_FEW_QUERIES, piece):
                near = {b + x for b in borders for x in (-before, _FEW_QUERIES)}
                yield [0, *sorted(near & {*range(1, tokens)}), tokens]

    @property
    def sends_either_side(self) -> bool:
        """Whether the run may send another side than the rehearsal, which has fewer chunks."""
        return self.sp_size > 1 and self.chunks > 1 and self.constants is None

    def strategies(self) -> list[str]:
        """Return the strategies that the run may use."""
        tokens = -(-self.seq_len // (self.sp_size * self.chunks))
        tokens *= self.rows if self.documents else 1
        if self.strategy != "auto":
            return [self.strategy]
        short = self.sp_size > 1 and tokens <= _FEW_TOKENS and self.inner_size == self.sp_size
        return ["ring", "one-call"] if short else ["ring"]

    def problem(self, seen: Seen, kernel: Kernel, side: str) -> Problem:
        """Return the call in which the ring sends `side`."""
        mask, layout, kv_layout = seen
        dtype = getattr(torch, self.dtype)
        partial = kernel.partial_dtype(dtype)
        batch = 1 if self.documents else min(self.rows, 2)
        return Problem(
            mask=mask,
            layout=layout,
            kv_layout=kv_layout,
            spec=self.spec,
            kernel=kernel,
            sizes=Sizes(batch, self.heads, self.kv_heads, self.head_size, dtype, partial),
            inner=self.inner_size,
            outer=self.sp_size // self.inner_size,
            # as many stages and passes as in the run
            group_bytes=max(GROUP_BYTES * self.tokens // self.seq_len, 1),
            forward=side,
            backward=side,
        )

    def plans(self, kernel: Kernel) -> Iterator[tuple[Plan, Problem, int]]:
        """Yield the plans of all kinds of calls, with their problem and rank."""
        for seen in self.masks():
            either = self.sends_either_side and seen[2] is not None
            sides = ("q", "kv") if either else ("auto",)
            ways = itertools.product(sides, self.strategies(), self.rank_sample())
            for side, name, rank in ways:
                problem = self.problem(seen, kernel, side)
                if self.constants:
                    plan = self.constants.plan(problem, rank, name)
                else:
                    plan = strategies.choose(name, problem).plan(problem, rank)
                yield plan, problem, rank


def _stack(rows: Sequence[Seen]) -> Seen:
    """Return the rows of a batch as one sequence."""
    if len(rows) == 1:
        return rows[0]
    masks, layouts, kv_layouts = zip(*rows, strict=True)
    has_others = kv_layouts[0] is not None  # then all rows have
    return Mask.stacked(masks), Stacked(layouts), Stacked(kv_layouts) if has_others else None


class _Ring(ImaginedRing):
    """An imagined ring whose messages arrive at once, with any content."""

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        return Ticket()


class Recorder(Kernel):
    """A kernel that computes nothing. It notes how to compile `kernel` for each variant of a call.

    A kernel without variants is called. Its launches are noted, if Triton compiles it.
    """

    def __init__(self, kernel: Kernel):
        self.kernel, self.name = kernel, kernel.name
        self.writes_new_memory = kernel.writes_new_memory
        self.jobs: dict[Hashable, Job] = {}

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return self.kernel.refuses(spec, q, k)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.kernel.partial_dtype(dtype)

    def forward(self, q, k, v, call, spec):
        if not self._note(_call_forward, q, k, call, spec):
            return self.kernel.forward(q, k, v, call, spec)
        return torch.empty_like(q, memory_format=torch.contiguous_format), empty_lse(q)

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        way = _call_backward if delta is None else _call_backward_by_delta
        if not self._note(way, q, k, call, spec):
            return self.kernel.backward(dout, q, k, v, out, lse, delta, call, spec)
        like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        return tuple(map(like, (q, k, v)))

    def _note(self, way: Job, q: Tensor, k: Tensor, call: KernelCall, spec: Spec) -> bool:
        """Note a call. Return whether the kernel has variants."""
        variant = self.kernel.variant(call, len(q))
        if variant is not None:
            # not the tensors: they take memory
            like = [
                functools.partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
                for x in (q, k)
            ]
            job = functools.partial(way, self.kernel, *like, call, spec)
            self.jobs.setdefault((way.__name__, q.shape[2] // k.shape[2], variant), job)
        return variant is not None


def _call_forward(kernel: Kernel, q: Job, k: Job, call: KernelCall, spec: Spec) -> None:
    keys = k()
    kernel.forward(q(), keys, keys, call, spec)


def _call_backward(kernel: Kernel, q: Job, k: Job, call: KernelCall, spec: Spec) -> None:
    x, keys = q(), k()
    kernel.backward(x, x, keys, keys, x, empty_lse(x).zero_(), None, call, spec)


def _call_backward_by_delta(kernel: Kernel, q: Job, k: Job, call: KernelCall, spec: Spec) -> None:
    x, keys = q(), k()
    rows = empty_lse(x).zero_()
    kernel.backward(x, x, keys, keys, None, rows, rows, call, spec)


def rehearse(rehearsal: Rehearsal, kernel: Recorder, device: torch.device) -> None:
    """Make all kinds of calls of a run, with their backward."""
    by_nope = rehearsal.constants is not None and rehearsal.constants.use_nope
    for plan, problem, rank in rehearsal.plans(kernel):
        with_inputs, with_sums = by_nope and plan.takes_inputs, rehearsal.chunks > 1
        make_calls(plan, problem, rank, device, with_inputs, with_sums)


@torch.no_grad()
def make_calls(
    plan: Plan,
    problem: Problem,
    rank: int,
    device: torch.device,
    with_inputs: bool = False,
    with_sums: bool = False,
) -> None:
    """Compute the part of a rank, of any values. `with_inputs` it chooses blocks by other tensors
    than q and k. `with_sums` it adds to gradients of keys, as chunks do.
    """
    sizes, inner, outer = problem.sizes, problem.inner, problem.outer
    rings = Rings(
        _Ring(rank % inner, inner) if inner > 1 else ALONE,
        _Ring(rank // inner, outer) if outer > 1 else ALONE,
        outer > 1,
    )
    plan.reserve(rings, device, with_backward=True)
    queries = problem.layout.length(rank)
    tokens = (problem.kv_layout or problem.layout).length(rank)
    q, dout, k, v = (
        torch.zeros(sizes.batch, *shape, sizes.head_size, dtype=sizes.dtype, device=device)
        for shape in [(queries, sizes.heads)] * 2 + [(tokens, sizes.kv_heads)] * 2
    )
    inputs = (q, k) if with_inputs else ()
    out, lse, kept = plan.forward(rings, q, k, v, inputs)
    sums = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v)) if with_sums else ()
    plan.backward(rings, QueryGradients(q, dout, lse, out), Keys(k, v, *sums), inputs, kept)


@contextlib.contextmanager
def _noting_launches(found: dict[str, Job]) -> Iterator[None]:
    """Launch no Triton kernel inside. Note how to compile each one that would be compiled."""
    from triton import knobs

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        found[data] = functools.partial(_compile, fn.jit_function, data)
        return True  # do not go on

    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = None


def _compile(function: Any, data: str) -> None:
    """Compile a kernel of Triton, and the C code that launches it."""
    _ = function.preload(data).run  # the first access makes what launches it


def find_jobs(rehearsal: Rehearsal, device: torch.device) -> list[Job]:
    """Return functions that compile a kernel each, those of FlashAttention-4 first."""
    recorder = Recorder(rehearsal.pick_kernel(device))
    launches: dict[str, Job] = {}
    with _noting_launches(launches):
        rehearse(rehearsal, recorder, device)
        has_parts = rehearsal.sp_size > 1 or rehearsal.chunks > 1 or any(rehearsal.windows)
        if has_parts or rehearsal.constants:
            _merge_parts(rehearsal, device)
        if rehearsal.constants:
            _take_blocks(rehearsal, rehearsal.constants, device)
        if rehearsal.lightning is not None:
            _pass_states(rehearsal, rehearsal.lightning, device)
        _make_passes(rehearsal, device)
    return [*recorder.jobs.values(), *launches.values()]


def _merge_parts(rehearsal: Rehearsal, device: torch.device) -> None:
    """Merge parts in all ways that a mask may ask for: of some tokens each, in place or not."""
    from bmt_burst.merging.fused import merge_outputs, sum_gradients

    dtype, whole = getattr(torch, rehearsal.dtype), [(0, 16)]
    sums = [(heads, dtype) for heads in {rehearsal.heads, rehearsal.kv_heads}]
    if rehearsal.chunks > 1:
        sums.append((rehearsal.kv_heads, torch.float32))
    for heads, of_sum in sums:
        shape = 1, 16, heads, rehearsal.head_size
        total, earlier = torch.empty(2, *shape, dtype=of_sum, device=device)
        other, lse = earlier.to(dtype), torch.empty(1, heads, 16, device=device)
        # parts of another dtype are filled up by the first one
        most = 17 if rehearsal.sends_either_side else 9
        counts = (2, 4, 8) if of_sum == dtype else range(2, most)
        ways = (total, earlier), counts, ([(0, 8)], [(0, 4), (8, 12)])
        for first, count, spans in itertools.product(*ways):
            sum_gradients(total, [(whole, first), *[(spans, other)] * (count - 1)])
            if (heads, of_sum) == (rehearsal.heads, dtype):  # as outputs have
                others = [(spans, other, lse)] * (count - 1)
                merge_outputs(total, lse, [(whole, first, lse), *others])


def _take_blocks(rehearsal: Rehearsal, sparse: InfLLMV2, device: torch.device) -> None:
    """Choose blocks in documents of all lengths that the run may have."""
    from bmt_burst.sparse.triton_choice import take_largest

    blocks, groups = sparse.most_blocks + 1, rehearsal.kv_heads
    while blocks < 2 * (rehearsal.seq_len // sparse.block_size + 1):
        scores = torch.empty(groups, 1, blocks, device=device)
        chosen = torch.empty(1, groups, sparse.most_blocks, dtype=torch.int32, device=device)
        take_largest(
            scores, scores, torch.zeros(1, dtype=torch.int64, device=device), chosen, sparse
        )
        blocks *= 2


def _pass_states(rehearsal: Rehearsal, flash: str, device: torch.device) -> None:
    """Compute lightning attention, with its backward, of a document that begins and ends on other
    ranks. It has several pieces, so this takes all kernels.
    """
    heads, size, dtype = rehearsal.heads, rehearsal.head_size, getattr(torch, rehearsal.dtype)
    x = torch.zeros(_TOKENS, heads, size, dtype=dtype, device=device)
    if (name := lightning_kernels.pick(flash, x)) != "triton":
        return
    kernel, segments = lightning_kernels.load(name), Segments((0, len(x)), (0,), (0,))
    rates = find_rates(segments, (0.0,) * heads, None, x)
    edge = torch.zeros(1, heads, size, size, device=device)
    states = kernel.forward_states(x, x, rates, segments)
    kernel.outputs(x, x, x, rates, 1.0, segments, states, edge)
    states = kernel.backward_states(x, x, rates, 1.0, segments)
    kernel.gradients(x, x, x, x, rates, 1.0, segments, edge, states, edge)


def _make_passes(rehearsal: Rehearsal, device: torch.device) -> None:
    """Make all passes of a block, of the loss and of the optimizer over some tokens."""
    from bmt_burst.fused import triton_passes as passes
    from train.engine import triton_adamw

    tokens, half = 16, rehearsal.head_size // 2
    like = {"dtype": getattr(torch, rehearsal.dtype), "device": device}
    for size in rehearsal.norms:
        x = torch.empty(1, tokens, size, **like)
        _, r = passes.normalize(x, x[0, 0], 1e-6)
        for residual in (x, None):
            passes.norm_gradients(x, x, x[0, 0], r, residual)
    for silu in (True, False) if rehearsal.gated else (True,):
        passes.gate(x, x, silu)
        passes.gate_gradients(x, x, x, again=True, silu=silu)
    table = torch.empty(tokens, half, device=device)
    for heads in {rehearsal.heads, rehearsal.kv_heads}:
        passes.rotate(torch.empty(1, tokens, heads, 2 * half, **like), table, table)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    for differentiate in (True, False):  # False: an evaluation
        passes.compute_losses(torch.empty(tokens, tokens, **like), tokens, labels, differentiate)
    master = torch.empty(tokens, device=device)
    weight = torch.empty(tokens, **like) if rehearsal.engine == "bmtrain" else None
    numbers = Update(1e-3, 1, 1.0, (0.9, 0.95), 1e-8, 0.1)
    # sums over micro-batches are fp32
    for gradient in (master,) if weight is None else (weight, master):
        triton_adamw.update(master, master, master, gradient, weight, numbers)


def main(argv: Sequence[str]) -> None:
    """Compile a share of a run's kernels. Print how many kernels there are in all."""
    share, shares, parent = map(int, argv[1:])
    die_with(parent)
    # only GPUs of the run: others may be in use
    device = torch.device("cuda", share % int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.cuda.set_device(device)
    settle_keys()
    jobs = find_jobs(Rehearsal(**json.loads(argv[0])), device)
    torch.cuda.empty_cache()  # ranks need the memory
    for job in jobs[share::shares]:
        job()
    print(len(jobs), flush=True)
    os._exit(0)  # at once: packages would print after the number


if __name__ == "__main__":
    main(sys.argv[1:])
