"""What the ranks of a call tell each other before they start, and what follows from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Kernel
from .layout import Layout
from .plan import travelling_bytes


def terms(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What a call means; all but "tokens" must be equal on all ranks."""
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    mine = {**options, "kernel": kernel.name, "need of a gradient": needs_gradient}
    del mine["flash"]
    if mine["softmax_scale"] is None:
        mine["softmax_scale"] = q.shape[-1] ** -0.5
    if mine["backward"] == "auto":
        moved = travelling_bytes(kernel, q, k, send_out=not options["optimize_bwd_comm"])
        mine["backward"] = min(moved, key=moved.get)
    batch, tokens, q_heads, head_size = q.shape
    shape = {"batch": batch, "tokens": tokens, "q heads": q_heads, "kv heads": k.shape[2], "head size": head_size}
    return {**shape, "dtype": str(q.dtype), "device type": q.device.type, **mine}


def compare(layout: str, replies: list[dict[str, Any]]) -> Layout:
    """The layout of the sequence that the ranks' terms describe. Raises ValueError, alike on every rank."""
    if len({reply.pop("process") for reply in replies}) < len(replies):
        raise ValueError(
            "double_group has a process at two places: intra must be a host's ranks, inter one of each host"
        )
    for rank, reply in enumerate(replies):
        if "failure" in reply:
            raise ValueError(f"rank {rank} of the group was given wrong arguments: {reply['failure']}")
    for rank, reply in enumerate(replies):
        for term, value in replies[0].items():
            if term != "tokens" and reply[term] != value:
                raise ValueError(f"ranks differ in {term}: rank 0 has {value!r}, rank {rank} has {reply[term]!r}")
    tokens = [reply["tokens"] for reply in replies]
    whole = Layout(layout, sum(tokens), len(tokens))
    expected = [whole.length(rank) for rank in range(whole.size)]
    if tokens != expected:
        raise ValueError(
            f"the ranks hold {tokens} tokens, but {layout} cuts {sum(tokens)} into {expected}; "
            "use bmt_burst.shard, or torch.tensor_split's sizes"
        )
    return whole


def plain_text(text: str) -> str:
    """Text that fits a message as JSON: printable ASCII, 400 characters at most."""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text[:400])
