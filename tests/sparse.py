"""InfLLM-V2 by its definition in float64, random cases of it, and what tests of models need."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bmt_burst import InfLLMV2
from bmt_burst.sparse.plan import SparsePlan

# MiniCPM 4.1's sparse_config
RELEASED = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "use_nope": False,
    "dense_len": 8192,
}


def record_choices(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an entry for each row of queries whose blocks are chosen."""
    found: list[None] = []
    choose_row = SparsePlan._choose_row
    monkeypatch.setattr(
        SparsePlan, "_choose_row", lambda *args: found.append(None) or choose_row(*args)
    )
    return found


def llama_config(sparse: InfLLMV2, **options: Any) -> Any:
    """Return the configuration of a small Llama of transformers with a sparse_config."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        sparse_config=sparse.to_dict(),
        **options,
    )


def chosen_blocks(
    q: Tensor, k: Tensor, cu_seqlens: Sequence[int], sparse: InfLLMV2, scale: float
) -> list[list[list[int]]]:
    """Return the blocks of each query and kv head: q (T, H, D), k (T, G, D), fp64.

    Scores that differ by rounding count as equal.
    """
    return [
        [_blocks_of(q[a:b], k[a:b], i, group, sparse, scale) for group in range(k.shape[1])]
        for a, b in itertools.pairwise(cu_seqlens)
        for i in range(b - a)
    ]


def _blocks_of(
    q: Tensor, k: Tensor, i: int, group: int, sparse: InfLLMV2, scale: float
) -> list[int]:
    """Return the blocks of query i of a document and a kv head."""
    size, stride, own = sparse.kernel_size, sparse.kernel_stride, i // sparse.block_size
    heads = q.shape[1] // k.shape[1]
    visible = range(max((i + 1 - size) // stride + 1, 0))
    keys = [k[j * stride : j * stride + size, group].mean(0) for j in visible]
    longer = range(max((i + 1 - 4 * size) // (4 * stride) + 1, 0))
    normal = [k[4 * j * stride :][: 4 * size, group].mean(0) for j in longer]
    score = [0.0] * len(keys)
    for head in range(group * heads, (group + 1) * heads):
        total = [scale * float(q[i, head] @ key) for key in normal]
        log = math.log(math.fsum(map(math.exp, total))) if total else 0.0
        for j, key in enumerate(keys):
            score[j] += math.exp(scale * float(q[i, head] @ key) - log)
    each = sparse.block_size // stride

    def rank(block: int) -> tuple[float, int]:
        if block < sparse.init_blocks or block >= own - sparse.window_blocks:
            return -math.inf, block
        near = score[max(each * block - 1, 0) : each * (block + 1)]
        return -float(f"{max(near, default=-math.inf):.11e}"), block

    return sorted(sorted(range(own + 1), key=rank)[: sparse.most_blocks])


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int],
    sparse: InfLLMV2,
    choose_by: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (T, H, D) and lse (H, T) of whole sequences in fp64, differentiable."""
    scale = q.shape[-1] ** -0.5
    by_q, by_k = (x.detach() for x in choose_by or (q, k))
    chosen = chosen_blocks(by_q, by_k, cu_seqlens, sparse, scale)
    return attend_to_blocks(q, k, v, cu_seqlens, chosen, sparse)


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int],
    chosen: list[list[list[int]]],
    sparse: InfLLMV2,
) -> tuple[Tensor, Tensor]:
    """Return the results of `oracle` for the `chosen` blocks of each query and kv head."""
    scale = q.shape[-1] ** -0.5
    starts = [a for a, b in itertools.pairwise(cu_seqlens) for _ in range(a, b)]
    hidden = torch.ones(k.shape[1], len(q), len(q), dtype=torch.bool)
    for i, (start, of_query) in enumerate(zip(starts, chosen, strict=True)):
        for group, blocks in enumerate(of_query):
            for block in blocks:
                first = start + block * sparse.block_size
                hidden[group, i, first : min(first + sparse.block_size, i + 1)] = False
    heads = q.shape[1] // k.shape[1]
    k, v, hidden = (x.repeat_interleave(heads, d) for x, d in ((k, 1), (v, 1), (hidden, 0)))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.unsqueeze(-1)).exp()
    return torch.einsum("hij,jhd->ihd", probs, v), lse


@dataclass(frozen=True)
class Case:
    """Constants, documents and sizes of a random call."""

    sparse: InfLLMV2
    cu_seqlens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_size: int


def random_case(chance: random.Random, tokens: int = 90) -> Case:
    """Return small constants and a few documents of up to `tokens` tokens."""
    stride, init = chance.choice((1, 2, 4)), chance.randint(0, 2)
    block = stride * chance.choice((1, 2, 4))
    sparse = InfLLMV2(
        block_size=block,
        kernel_size=2 * stride,
        kernel_stride=stride,
        init_blocks=init,
        window_size=block * chance.randint(1, 3),
        topk=init + chance.randint(1, 4),
        dense_len=-1,
    )
    lengths = [chance.choice((1, 7, tokens // 3, tokens)) for _ in range(chance.randint(1, 3))]
    groups = chance.choice((1, 2))
    return Case(
        sparse,
        tuple(itertools.accumulate(lengths, initial=0)),
        groups * chance.choice((1, 2, 4, 8, 16)),
        groups,
        chance.choice((4, 8, 24)),
    )
