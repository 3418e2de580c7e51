"""The seconds of a training step, by what takes them.

Matrix products, memory traffic and attention follow one another on a GPU, each at a rate of the
hardware. Sending weights and keys overlaps with them, as do copies to the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bmt_burst.planning import AttentionShape, LightningShape
from train.loop.measure import LIGHTNING_BACKWARD, lightning_flops

from .memory import AttentionRun, Step

GIB = 1 << 30

# Memory that a plan leaves free: CUDA, NCCL and kernels take some that torch does not count, and
# the allocator cannot use all of the rest.
_RESERVED_GIB, _RESERVED_SHARE = 1.5, 0.03
_BACKWARD_OPERATIONS = 2.5  # of attention, relative to its forward: five products instead of two
_RING_RATE = 0.96  # of attention on several ranks, relative to one
# Sparse attention, from bench/results/sparse-1-nvidia-h200.jsonl and -2-: seconds of 32 heads for
# each compressed key that a query is compared with, whatever their size, and of 32 heads of size
# 128 for each token's forward and backward. Half of the time for a token grows with the size of a
# head. It is less where neighbouring queries choose 80 % of the same blocks than where they choose
# independently. Steps of untrained models were like the first at 128K tokens, and like the second
# at 1M.
_CHOICE_S = 64e-12
_SPARSE_FORWARD_S, _SPARSE_BACKWARD_S = (0.28e-6, 0.62e-6), (0.92e-6, 1.47e-6)
_SIMILAR_TOKENS, _INDEPENDENT_TOKENS = 1 << 17, 1 << 20
_HEADS, _HEAD_SIZE = 32, 128
# The launches of lightning attention's Triton kernel read and write these tensors of q's size, and
# states:
#
#   forward   sum_pieces  reads k, v
#             attend      reads q, k, v, writes out
#   backward  sum_pieces  reads q, dout
#             attend_back reads q, k, v, dout, writes dk, dv
#             sum_pieces  reads k, v
#             attend      reads dout, k, v, writes dq
#
# Programs of other columns of a head, and those of dk and dv, read the same rows. They run side by
# side, so the L2 cache has a row for all but the first. Of heads that decay fast, sum_pieces reads
# the last tokens of a piece only. It writes the states before pieces, chain_states reads and writes
# them, and the next attend reads them.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 6, 14
_FORWARD_STATES, _BACKWARD_STATES = 4, 8
_STATES_RATE = 150e9  # bytes a second at which states are exchanged, an assumption
# Bytes a second from one rank of a host, and the most from all, in the rows "links" of
# bench/results/attention-4-nvidia-h200.jsonl.
_RANK_LINK, _HOST_LINKS = 150e9, 300e9
# Assumptions, since hosts differ: bytes a second between a GPU and the host's memory, each way, and
# parameters a second that AdamW updates there.
_LINK, _HOST_UPDATE = 45e9, 1e9


@dataclass(frozen=True)
class Hardware:
    """A GPU's memory, and rates that a training step reaches.

    gib             memory
    products        operations a second of matrix products
    traffic         bytes a second that products and other operations read and write
    attention       operations a second of a forward and a backward of dense attention, with heads
                    of up to 64, and larger ones
    update          parameters a second that AdamW updates
    source          how the rates were found
    fp8             how many times as fast products in float8 are, with casts. None if the GPU has
                    none
    """

    name: str
    gib: float
    products: float
    traffic: float
    attention: Mapping[int, tuple[float, float]]
    update: float
    source: str
    fp8: float | None = 1.5

    def attention_rates(self, head_size: int) -> tuple[float, float]:
        """Return the rates of attention with heads of this size."""
        return self.attention[64 if head_size <= 64 else 128]

    def scaled(self, name: str, gib: float, tflops: float, tbs: float) -> Hardware:
        """Return another GPU. It has these peaks of dense bf16 and of memory bandwidth."""
        compute, bandwidth = tflops / _PEAK_TFLOPS, tbs / _PEAK_TBS
        return replace(
            self,
            name=name,
            gib=gib,
            products=self.products * compute,
            traffic=self.traffic * bandwidth,
            attention={
                size: (forward * compute, backward * compute)
                for size, (forward, backward) in self.attention.items()
            },
            update=self.update * bandwidth,
            source=f"scaled from an {self.name}'s by the vendors' peaks, not measured",
        )


# docs/planning.md says which rows of bench/results the rates are from.
H100 = Hardware(
    name="h100",
    gib=79.6,
    products=740e12,
    traffic=2.67e12,
    attention={64: (508e12, 540e12), 128: (665e12, 602e12)},
    update=80e9,
    source="measured, heads of up to 64 on an H200",
)
H200 = replace(
    H100,
    name="h200",
    gib=139.8,
    products=720e12,
    attention={64: (508e12, 540e12), 128: (650e12, 605e12)},
    update=105e9,
    source="measured, memory traffic and float8 on an H100",
)
_PEAK_TFLOPS, _PEAK_TBS = 989, 3.35  # of an H100

# Peaks are from the vendors' datasheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        H100,
        replace(H100.scaled("a100", 79.3, 312, 2.04), fp8=None),
        H100.scaled("l40s", 44.5, 362, 0.864),
        H100.scaled("rtx4090", 23.6, 165, 1.01),
    )
}


def usable_bytes(gib: float) -> int:
    """Return the bytes of a GPU that a step may use. Raises ValueError if none are left."""
    usable = (gib * (1 - _RESERVED_SHARE) - _RESERVED_GIB) * GIB
    if not 0 < usable < math.inf:
        raise ValueError(
            f"--gpu-memory must be at least {_RESERVED_GIB + 1:g} and finite, got {gib:g}"
        )
    return int(usable)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, by what takes them."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_seconds(step: Step, hardware: Hardware) -> StepSeconds:
    """Return the seconds of a step on one rank."""
    products = traffic = attention = waiting = 0.0
    for work, runs in ((step.forward, ("forward",)), (step.backward, ("again", "backward"))):
        by_products, by_traffic = work.products / hardware.products, work.traffic / hardware.traffic
        if work.fp8:
            assert hardware.fp8 is not None, "plan refuses it"
            by_products += work.fp8 / (hardware.products * hardware.fp8)
        by_attention = sum(
            count * attention_seconds(run, hardware)
            for run, count in step.attention.items()
            if run.run in runs
        )
        busy = by_products + by_traffic + by_attention
        waiting += max(step.memory.parked / _LINK - busy, 0.0)
        products, traffic = products + by_products, traffic + by_traffic
        attention += by_attention
    count = step.micro_batches
    parts = {
        "matrix products": count * products,
        "attention": count * attention,
        "sending kept keys": count * _sending_seconds(step),
        "memory traffic": count * traffic,
        "waiting for offloaded activations": count * waiting,
        "optimizer": step.shard / (_HOST_UPDATE if step.on_host else hardware.update),
    }
    return StepSeconds({name: seconds for name, seconds in parts.items() if seconds})


def attention_seconds(run: AttentionRun, hardware: Hardware) -> float:
    """Return the seconds of a forward or backward of one attention."""
    shape = run.shape
    if isinstance(shape, LightningShape):
        return _lightning_seconds(shape, run.run, hardware)
    sparse = shape.sparse
    if sparse is None or sparse.is_dense(shape.tokens) or shape.tokens <= sparse.exact_tokens:
        return _dense_seconds(shape, rank_pairs(shape), run.run, hardware)
    first = replace(shape, tokens=sparse.exact_tokens)  # whose queries see all earlier tokens
    seconds = _dense_seconds(shape, rank_pairs(first), run.run, hardware)
    return seconds + _sparse_seconds(shape, run.run, hardware)


def _dense_seconds(shape: AttentionShape, pairs: float, run: str, hardware: Hardware) -> float:
    """Return the seconds in which a rank computes visible pairs of one head, for all heads."""
    forward, backward = hardware.attention_rates(shape.head_size)
    rate = forward if run != "backward" else backward / _BACKWARD_OPERATIONS
    operations = 4.0 * shape.heads * shape.head_size * pairs
    return operations / rate / (_RING_RATE if shape.ranks > 1 else 1.0)


def rank_pairs(shape: AttentionShape) -> float:
    """Return a rank's pairs of a query and a key, of one head, in one document."""
    tokens, window = shape.tokens, min(shape.window or shape.tokens, shape.tokens)
    return shape.batch * (tokens - (window - 1) / 2) * window / shape.ranks


def _sparse_seconds(shape: AttentionShape, run: str, hardware: Hardware) -> float:
    """Return the seconds of queries that choose. "again" takes the choice of an earlier forward."""
    assert shape.sparse is not None
    first = shape.sparse.exact_tokens
    of_h200 = H200.attention_rates(128)[0] / hardware.attention_rates(128)[0]
    heads = of_h200 * shape.heads / _HEADS
    choosing = shape.batch * (shape.tokens - first) / shape.ranks
    tokens = choosing * (1 + shape.head_size / _HEAD_SIZE) / 2
    if run == "backward":
        return _interpolate(_SPARSE_BACKWARD_S, shape.tokens) * tokens * heads
    pairs = rank_pairs(shape) - rank_pairs(replace(shape, tokens=first))
    compared = pairs / shape.sparse.kernel_stride if run == "forward" else 0.0
    attending = _interpolate(_SPARSE_FORWARD_S, shape.tokens) * tokens
    return (_CHOICE_S * compared + attending) * heads


def _interpolate(ends: tuple[float, float], tokens: int) -> float:
    """Return the seconds of a token between those of similar and of independent choices."""
    similar, independent = ends
    reached = math.log2(tokens / _SIMILAR_TOKENS) / math.log2(_INDEPENDENT_TOKENS / _SIMILAR_TOKENS)
    return similar + min(max(reached, 0.0), 1.0) * (independent - similar)


def _lightning_seconds(shape: LightningShape, run: str, hardware: Hardware) -> float:
    """Return the seconds of a "forward", "backward", or "again". It is bound by memory or by matrix
    products. In a chunk, the exchange of all states follows. The few states of a whole sequence are
    not counted.
    """
    tensors, states, factor = _FORWARD_TENSORS, _FORWARD_STATES, 1.0
    if run == "backward":
        tensors, states, factor = _BACKWARD_TENSORS, _BACKWARD_STATES, LIGHTNING_BACKWARD
    entries = shape.rank_tokens * shape.heads * shape.head_size
    nbytes = tensors * entries * shape.dtype.itemsize + states * shape.piece_bytes
    operations = factor * shape.rank_tokens * lightning_flops(shape.heads, shape.head_size)
    exchange = shape.exchanged_bytes / _STATES_RATE if shape.chunked else 0.0
    return max(nbytes / hardware.traffic, operations / hardware.products) + exchange


def _sending_seconds(step: Step) -> float:
    """Return the seconds in which chunks gather the keys of earlier ones, for sparse attention.
    Nothing hides them. Dense attention computes meanwhile.
    """
    seconds = 0.0
    for run, count in step.attention.items() if step.chunks > 1 else ():
        if _is_sparse(run.shape) and (others := run.shape.ranks - 1):
            received = count_keys(run, step.chunks) * others / run.shape.ranks
            seconds += count * received / min(others * _RANK_LINK, _HOST_LINKS)
    return seconds


def _is_sparse(shape: AttentionShape | LightningShape) -> bool:
    """Whether queries choose."""
    sparse = shape.sparse if isinstance(shape, AttentionShape) else None
    return sparse is not None and not sparse.is_dense(shape.tokens)


def count_keys(run: AttentionRun, chunks: int) -> float:
    """Count the bytes of keys that an attention sends, or of its queries if these are fewer.

    A forward sends keys and values, or queries and their results. A backward also sends gradients.
    Sparse attention always sends keys, and in a forward once more to choose. Chunks send the keys
    of all earlier ones again. States of lightning attention are few.
    """
    shape, is_backward = run.shape, run.run == "backward"
    if not isinstance(shape, AttentionShape):
        return 0.0
    is_sparse = _is_sparse(shape)
    of_head = shape.batch * shape.head_size * shape.dtype.itemsize
    tokens = min(shape.tokens, 2 * (shape.window or shape.tokens))  # zigzag has two runs
    parts = 4 if is_backward else 3 if is_sparse and run.run == "forward" else 2
    by_keys = parts * tokens * shape.kv_heads * of_head * (chunks + 1) / 2
    by_queries = (3 if is_backward else 2) * shape.tokens * shape.heads * of_head
    return by_keys if is_sparse else min(by_keys, by_queries)
