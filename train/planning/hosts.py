"""The sends between hosts: the bytes that a host receives, and the seconds in which GPUs wait.

Weights are gathered from all hosts, and gradients are reduced over them. If a sequence is cut over
several hosts, each of them also receives the keys of the others, as in the double ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmt_burst.planning import AttentionShape

from .memory import AttentionRun, Step
from .seconds import Hardware, StepSeconds, attention_seconds

_GRADIENT_BYTES = {"torch": 4, "bmtrain": 2}  # of a parameter, when gradients are reduced


@dataclass(frozen=True)
class Sends:
    """The bytes that a host receives in one micro-batch.

    weights  gathered weights and reduced gradients
    keys     those of each run of an attention
    """

    weights: float
    keys: dict[AttentionRun, float]

    def total(self, step: Step) -> float:
        """Return the bytes of a step."""
        keys = sum(count * self.keys[run] for run, count in step.attention.items())
        return step.micro_batches * (self.weights + keys)


def count_sends(
    step: Step, parameters: int, itemsize: int, engine: str, hosts: int, sharing: int
) -> Sends:
    """Count the sends of a step on `hosts` hosts, of which `sharing` share a sequence. A weight has
    `itemsize` bytes when it is gathered, which happens twice.
    """
    of_parameter = 2 * itemsize + max(_GRADIENT_BYTES[engine], itemsize)
    weights = step.chunks * parameters * of_parameter * (hosts - 1) / hosts
    keys = {run: _count_keys(run, step.chunks) * (sharing - 1) / sharing for run in step.attention}
    return Sends(weights, keys)


def _count_keys(run: AttentionRun, chunks: int) -> float:
    """Count the bytes of an attention's keys, or of its queries if these are fewer.

    A forward sends keys and values, or queries and their results. A backward also sends gradients.
    Sparse attention always sends keys, and in a forward once more to choose. Chunks send the keys
    of all earlier ones again. States of lightning attention are few.
    """
    shape = run.shape
    if not isinstance(shape, AttentionShape):
        return 0.0
    tokens = min(shape.tokens, 2 * (shape.window or shape.tokens))  # zigzag has two runs
    of_head = shape.batch * shape.head_size * shape.dtype.itemsize
    is_sparse = shape.sparse is not None and not shape.sparse.is_dense(shape.tokens)
    parts = 4 if run.run == "backward" else 2 + (is_sparse and run.run == "forward")
    by_keys = parts * tokens * shape.kv_heads * of_head * (chunks + 1) / 2
    if is_sparse:
        return by_keys
    parts = 3 if run.run == "backward" else 2
    return min(by_keys, parts * shape.tokens * shape.heads * of_head)


def add_waiting(
    seconds: StepSeconds, step: Step, sends: Sends, hardware: Hardware, rate: float
) -> StepSeconds:
    """Return the seconds of a step with those in which GPUs wait for other hosts, at `rate` bytes a
    second of a host. An attention's keys are sent while it runs, weights during the whole step.
    """
    waiting = sum(
        count * max(sends.keys[run] / rate - attention_seconds(run, hardware), 0.0)
        for run, count in step.attention.items()
    )
    busy = seconds.total - seconds.parts["optimizer"]
    waiting = step.micro_batches * waiting
    waiting += max(step.micro_batches * sends.weights / rate - busy, 0.0)
    if not waiting:
        return seconds
    return replace(seconds, parts={**seconds.parts, "waiting for other hosts": waiting})
