"""The bytes that a host receives from other hosts in a step.

Weights are gathered from all hosts, and gradients are reduced over them. If a sequence is cut over
several hosts, each of them also receives the keys of the others, as in the double ring.
"""

from __future__ import annotations

from bmt_burst.planning import AttentionShape

from .memory import AttentionRun, Step

_GRADIENT_BYTES = {"torch": 4, "bmtrain": 2}  # of a parameter, at least, when they are reduced


def received_bytes(
    step: Step, parameters: int, itemsize: int, engine: str, hosts: int, sharing: int
) -> float:
    """Return the bytes that each of `hosts` hosts receives in a step, if `sharing` of them share a
    sequence. A weight has `itemsize` bytes when it is gathered, which happens twice.
    """
    of_parameter = 2 * itemsize + max(_GRADIENT_BYTES[engine], itemsize)
    weights = step.chunks * parameters * of_parameter
    keys = sum(count * _count_keys(run, step.chunks) for run, count in step.attention.items())
    received = weights * (hosts - 1) / hosts + keys * (sharing - 1) / sharing
    return step.micro_batches * received


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
