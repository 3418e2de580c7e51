"""The sends between hosts: the bytes that a host receives, and the seconds in which GPUs wait.

Weights are gathered from all hosts, and gradients are reduced over them. If a sequence is cut over
several hosts, each of them also receives the keys of the others, as in the double ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmt_burst.planning import AttentionShape

from .memory import AttentionRun, Step
from .seconds import Hardware, attention_seconds

_GRADIENT_BYTES = {"torch": 4, "bmtrain": 2}  # of a parameter, at least, when they are reduced


@dataclass(frozen=True)
class Sends:
    """The bytes that a host receives in one micro-batch.

    weights  gathered weights and reduced gradients
    keys     those of each run of an attention, and how often it runs
    """

    weights: float
    keys: dict[AttentionRun, tuple[float, float]]

    @property
    def total(self) -> float:
        return self.weights + sum(nbytes * count for nbytes, count in self.keys.values())

    def waiting(self, rate: float, busy: float, hardware: Hardware) -> float:
        """Return the seconds in which GPUs wait in a micro-batch that computes for `busy` seconds,
        if a host receives `rate` bytes a second. An attention's keys are sent while it runs.
        """
        waits = (
            count * max(nbytes / rate - attention_seconds(run, hardware), 0.0)
            for run, (nbytes, count) in self.keys.items()
        )
        return sum(waits) + max(self.weights / rate - busy, 0.0)


def count_sends(
    step: Step, parameters: int, itemsize: int, engine: str, hosts: int, sharing: int
) -> Sends:
    """Count the sends of a step on `hosts` hosts, of which `sharing` share a sequence. A weight has
    `itemsize` bytes when it is gathered, which happens twice.
    """
    of_parameter = 2 * itemsize + max(_GRADIENT_BYTES[engine], itemsize)
    weights = step.chunks * parameters * of_parameter * (hosts - 1) / hosts
    share = (sharing - 1) / sharing
    keys = {
        run: (share * _count_keys(run, step.chunks), count) for run, count in step.attention.items()
    }
    return Sends(weights, keys)


def _count_keys(run: AttentionRun, chunks: int) -> float:
    """Count the bytes of an attention's keys, or of its queries if these are fewer.

    A forward sends keys and values, or queries and their results. A backward also sends gradients.
    Sparse attention always sends keys, and in a forward once more to choose. Chunks send the keys
    of all earlier ones again. States of lightning attention are few.
    """
    shape, is_backward = run.shape, run.run == "backward"
    if not isinstance(shape, AttentionShape):
        return 0.0
    is_sparse = shape.sparse is not None and not shape.sparse.is_dense(shape.tokens)
    of_head = shape.batch * shape.head_size * shape.dtype.itemsize
    tokens = min(shape.tokens, 2 * (shape.window or shape.tokens))  # zigzag has two runs
    parts = 4 if is_backward else 3 if is_sparse and run.run == "forward" else 2
    by_keys = parts * tokens * shape.kv_heads * of_head * (chunks + 1) / 2
    by_queries = (3 if is_backward else 2) * shape.tokens * shape.heads * of_head
    return by_keys if is_sparse else min(by_keys, by_queries)
