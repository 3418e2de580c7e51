"""The seconds of a training step, by what takes them.

Matrix products, other operations and attention follow one another on a GPU, each at a rate of the
hardware. Gathering weights and sending keys overlap with them, and so do copies to the host as far
as the link is fast enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .attention import AttentionShape
from .hardware import GPUS, Hardware
from .memory import AttentionRun, Step

_BACKWARD_OPERATIONS = 2.5  # of attention, relative to its forward: five products instead of two
_RING_RATE = 0.96  # of attention on several ranks, relative to one

# Sparse attention, from bench/results/sparse-1-nvidia-h200.jsonl and -2-: seconds of 32 heads for
# each compressed key that a query is compared with, whatever their size, and of 32 heads of size
# 128 for each token's forward and backward, where neighbouring queries choose 80 % of the same
# blocks. Half of the time for a token grows with the size of a head.
_CHOICE_S, _SPARSE_FORWARD_S, _SPARSE_BACKWARD_S = 64e-12, 0.28e-6, 0.92e-6
_HEADS, _HEAD_SIZE = 32, 128


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, by what takes them."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_seconds(step: Step, hardware: Hardware) -> StepSeconds:
    """Return the seconds of a step on one rank."""
    products = other = attention = waiting = 0.0
    for work, rate, runs in (
        (step.forward, hardware.products, ("forward",)),
        (step.backward, hardware.backward_products, ("again", "backward")),
    ):
        by_products, by_other = work.products / rate, work.traffic / hardware.traffic
        by_attention = sum(
            count * attention_seconds(run, hardware)
            for run, count in step.attention.items()
            if run.run in runs
        )
        busy = by_products + by_other + by_attention
        waiting += max(step.memory.parked / hardware.link - busy, 0.0)
        products, other = products + by_products, other + by_other
        attention += by_attention
    count = step.micro_batches
    parts = {
        "matrix products": count * products,
        "attention": count * attention,
        "other operations": count * other,
        "waiting for offloaded activations": count * waiting,
        "optimizer": step.shard / (hardware.host_update if step.on_host else hardware.update),
    }
    return StepSeconds({name: seconds for name, seconds in parts.items() if seconds})


def attention_seconds(run: AttentionRun, hardware: Hardware) -> float:
    """Return the seconds of a forward or backward of one attention."""
    shape = run.shape
    if shape.sparse is not None and not shape.sparse.is_dense(shape.tokens):
        return _sparse_seconds(shape, run.run, hardware)
    forward, backward = hardware.attention_rates(shape.head_size)
    rate = forward if run.run != "backward" else backward / _BACKWARD_OPERATIONS
    operations = 4.0 * shape.heads * shape.head_size * rank_pairs(shape)
    return operations / rate / (_RING_RATE if shape.ranks > 1 else 1.0)


def rank_pairs(shape: AttentionShape) -> float:
    """Return a rank's pairs of a query and a key, of one head, in one document."""
    tokens, window = shape.tokens, min(shape.window or shape.tokens, shape.tokens)
    return shape.batch * (tokens - (window - 1) / 2) * window / shape.ranks


def _sparse_seconds(shape: AttentionShape, run: str, hardware: Hardware) -> float:
    """Return the seconds of sparse attention. "again" takes the choice of an earlier forward."""
    assert shape.sparse is not None
    of_h200 = GPUS["h200"].attention_rates(128)[0] / hardware.attention_rates(128)[0]
    heads = of_h200 * shape.heads / _HEADS
    tokens = shape.batch * shape.rank_tokens * (1 + shape.head_size / _HEAD_SIZE) / 2
    if run == "backward":
        return _SPARSE_BACKWARD_S * tokens * heads
    compared = rank_pairs(shape) / shape.sparse.kernel_stride if run == "forward" else 0.0
    return (_CHOICE_S * compared + _SPARSE_FORWARD_S * tokens) * heads
