"""Inputs of attention: tensors, kernel calls, biases, masks and layouts, random or by name."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import torch
from torch import Tensor

from bmt_burst import Layout, Mask, Slice
from bmt_burst.bias.call_bias import CallBias, SegmentIds
from bmt_burst.sequence.layout import LAYOUTS, Balanced, Chunked
from bmt_burst.sequence.tile import KernelCall


def random_qkv(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype=torch.float64,
    seed: int = 0,
):
    """Return random q, k, v and an output gradient."""
    call = KernelCall.whole(tokens)
    return call_tensors(call, batch, heads, kv_heads, head_size, dtype, seed)


def named_calls(unit: int) -> dict[str, KernelCall]:
    """Return kernel calls of every kind. Tiles have a few times `unit` tokens, 4 or more."""
    square, n = (0, 8 * unit), 8 * unit
    cuts = [0, 1, 2 * unit + 1, 2 * unit + 3, 5 * unit, n]
    documents = tuple((span, span) for span in itertools.pairwise(cuts))
    wide = ((0, unit), (0, 3 * unit)), ((unit, 4 * unit), (3 * unit, 7 * unit))
    tall = ((0, 4 * unit), (0, unit)), ((4 * unit, 7 * unit + 1), (unit, 4 * unit))
    apart = ((unit, 2 * unit), (2 * unit, 3 * unit)), ((2 * unit, 5 * unit), (4 * unit, 7 * unit))
    count = min(12 * unit, 300)
    # and a query between two
    many = tuple(((3 * i, 3 * i + 2), (2 * i, 2 * i + 2)) for i in range(count))
    return {
        "full": KernelCall.whole(n),
        "causal": KernelCall.whole(n, causal=True),
        "full, fewer keys": KernelCall.whole(n, 3 * unit + 1),
        "causal, more keys": KernelCall.whole(3 * unit, n, causal=True),
        "causal, fewer keys": KernelCall.whole(n, 3 * unit, causal=True),
        "documents": KernelCall(n, n, documents, right=0),
        "full documents": KernelCall(n, n, documents),
        "a window": KernelCall(n, n, ((square, square),), unit, 0),
        "a window of documents": KernelCall(n, n, documents, unit, 0),
        "a window wider than documents": KernelCall(n, n, documents, n, 0),
        "a window to both sides": KernelCall(n, n, documents, 2 * unit, unit // 2),
        "only some ahead": KernelCall(n, n, documents, None, unit),
        "only some behind": KernelCall(n, n, documents, unit, None),
        "itself and what is ahead": KernelCall(n, n, ((square, square),), 0, None),
        "itself": KernelCall(n, n, documents, 0, 0),
        "causal tiles of more keys": KernelCall(5 * unit, n, wide, right=0),
        "causal tiles of fewer keys": KernelCall(n, 5 * unit, tall, right=0),
        "a window of fewer keys": KernelCall(n, 5 * unit, tall, unit // 2, 1),
        "behind, of fewer keys": KernelCall(n, 5 * unit, tall, unit // 2, None),
        "far ahead, of fewer keys": KernelCall(n, 5 * unit, tall, n, 3 * unit),
        "tiles apart": KernelCall(6 * unit, n, apart, right=0),
        "full tiles apart": KernelCall(6 * unit, n, apart),
        "few of the tokens": KernelCall(
            n, n, (((3 * unit, 4 * unit), (5 * unit, 7 * unit)),), 2, 2
        ),
        "single tokens": KernelCall(
            unit, unit, tuple(((i, i + 1), (i, i + 1)) for i in range(unit)), right=0
        ),
        "many tiles": KernelCall(3 * count, 2 * count, many, right=0),
        "many full tiles": KernelCall(3 * count, 2 * count, many),
    }


def random_call(chance: random.Random, most: int = 20) -> KernelCall:
    """Return a call of a few tiles of up to `most` tokens a side, with or without gaps."""
    tiles, q, kv = [], 0, 0
    for _ in range(chance.randint(1, 6)):
        q, kv = (at + chance.choice((0, 0, chance.randint(1, 5))) for at in (q, kv))
        queries = chance.randint(1, most)
        keys = chance.choice((queries, chance.randint(1, most)))
        tiles.append(((q, q + queries), (kv, kv + keys)))
        q, kv = q + queries, kv + keys
    left, right = (chance.choice((None, 0, 1, chance.randint(0, most + 5))) for _ in range(2))
    return KernelCall(
        q + chance.choice((0, 3)), kv + chance.choice((0, 3)), tuple(tiles), left, right
    )


def call_tensors(
    call: KernelCall,
    batch: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype=torch.float64,
    seed=0,
):
    """Return random q, k, v and an output gradient for a kernel call."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (call.q_tokens, heads),
        (call.kv_tokens, kv_heads),
        (call.kv_tokens, kv_heads),
        (call.q_tokens, heads),
    )
    shapes = [(batch, *size, head_size) for size in sizes]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


def random_bias(
    call: KernelCall, heads: int, seed: int = 0, dtype=torch.float64, reach: int = 9
) -> CallBias:
    """Return a bias of 12 rows.

    Queries and keys are rising tokens of one sequence, which has groups of segments.
    """
    chance, tokens, rows = random.Random(seed), 2 * max(call.q_tokens, call.kv_tokens), 12
    fields, pairs, group = [], [], 0
    while len(fields) < tokens:
        segments, offset = chance.randint(1, 4), len(pairs)
        for i in range(segments):
            pairs += [-1 if i == j else chance.randint(-1, rows - 1) for j in range(segments)]
            fields += [(group, offset + i * segments, i)] * chance.randint(1, tokens // 3 + 1)
        group += 1
    q, kv = (_some_tokens(chance, count, tokens) for count in (call.q_tokens, call.kv_tokens))
    generator = torch.Generator().manual_seed(seed)
    q_group, q_base, _ = torch.tensor([fields[t] for t in q], dtype=torch.int32).T.contiguous()
    kv_group, _, kv_segment = torch.tensor(
        [fields[t] for t in kv], dtype=torch.int32
    ).T.contiguous()
    pairs = torch.tensor(pairs, dtype=torch.int32)
    segments = SegmentIds(q_group, q_base, kv_group, kv_segment, pairs, chance.randrange(rows))
    return CallBias(
        table=torch.randn(rows, heads, dtype=torch.float64, generator=generator).to(dtype),
        q_position=torch.tensor(q, dtype=torch.int32),
        kv_position=torch.tensor(kv, dtype=torch.int32),
        distances=torch.randint(rows, (2 * reach + 1,), dtype=torch.int32, generator=generator),
        segments=segments,
    )


def bias_by_distance(call: KernelCall, heads: int, seed: int = 0, dtype=torch.float64) -> CallBias:
    """Return a `random_bias` by distance alone: tokens are neighbours in each tile, anywhere."""
    bias, chance = random_bias(call, heads, seed, dtype), random.Random(seed)
    q, kv = (torch.arange(count, dtype=torch.int32) for count in (call.q_tokens, call.kv_tokens))
    for rows, columns in call.tiles:
        q[slice(*rows)] += chance.randint(0, 20)
        kv[slice(*columns)] += chance.randint(0, 20)
    apart = tuple(int(kv[columns[0]] - q[rows[0]]) for rows, columns in call.tiles)
    return replace(bias, q_position=q, kv_position=kv, segments=None, apart=apart)


def moved(bias: CallBias, device: str) -> CallBias:
    """Return the bias on a device."""
    segments = bias.segments and replace(bias.segments, **_on(bias.segments, device))
    return replace(bias, **_on(bias, device), segments=segments, prepared={})


def _on(fields: object, device: str) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in vars(fields).items() if isinstance(x, Tensor)}


def _some_tokens(chance: random.Random, count: int, tokens: int) -> list[int]:
    """Return `count` rising tokens of at least twice as many.

    They are those of a rank of a contiguous, zigzag or striped layout, or any.
    """
    first, half = chance.randint(0, tokens - 2 * count), count // 2
    return chance.choice(
        (
            list(range(first, first + count)),
            [*range(half), *range(tokens - count + half, tokens)],
            list(range(first, first + 2 * count, 2)),
            sorted(chance.sample(range(tokens), count)),
        )
    )


def random_mask(chance: random.Random, tokens: int) -> Mask:
    """Return a mask of any kind: causal, full, windows, documents, both, or arbitrary slices."""
    cuts = sorted({0, tokens, *(chance.randint(1, tokens) for _ in range(chance.randint(0, 6)))})
    window = chance.randint(1, tokens)
    makers = (
        lambda: Mask.causal(tokens),
        lambda: Mask.full(tokens),
        lambda: Mask.window(tokens, window),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7, window=window),
        lambda: Mask(tokens, tuple(random_slices(chance, tokens))),
    )
    return chance.choice(makers)()


def random_slices(chance: random.Random, tokens: int):
    """Yield cells of a grid, each with a band of its own. Some cells have two bands that touch."""
    grid = [sorted({0, tokens, *(chance.randint(0, tokens) for _ in range(3))}) for _ in range(2)]
    for q, kv in itertools.product(*map(itertools.pairwise, grid)):
        low, high = (chance.choice((None, chance.randint(-tokens, tokens))) for _ in range(2))
        if chance.random() < 0.6:
            yield Slice(q, kv, low, high)
            if high is not None and (low is None or low <= high) and chance.random() < 0.3:
                yield Slice(q, kv, high, high + 3)


def random_two_lengths(chance: random.Random, size: int) -> tuple[Mask, Layout, Layout]:
    """Return a mask of two lengths or layouts, and the layouts of its queries and keys."""
    tokens = chance.randint(size, 60)
    start = chance.randint(0, tokens - size)
    mask = random_mask(chance, tokens).rows(start, chance.randint(start + size, tokens))
    if chance.random() < 0.3:
        cuts = [sorted(chance.choices(range(30), k=3)) for _ in range(2)]
        queries, keys = ((0, *some, 30 + chance.randint(0, 9)) for some in cuts)
        window = chance.choice((None, chance.randint(1, 20)))
        mask = Mask.documents(queries, chance.random() < 0.7, window, kv_cu_seqlens=keys)
    mask = mask.transposed if chance.random() < 0.4 else mask
    return mask, random_layout(chance, mask, size), random_layout(chance, mask.transposed, size)


def made_layout(name: str, mask: Mask, size: int) -> Layout:
    """Return the layout with this name, or "balanced", for the tokens of a mask."""
    if name == Balanced.name:
        return Layout.balanced(mask, size)
    return Layout.named(name, mask.seq_len, size)


def random_layout(chance: random.Random, mask: Mask, size: int) -> Layout:
    """Return one of the named layouts, the balanced layout of the mask, or chunks."""
    name = chance.choice([*LAYOUTS, Balanced.name, Chunked.name])
    if name == Chunked.name:
        tokens = chance.randint(2 * size, 2 * size + 20)
        return Layout.chunks(mask.seq_len, size, tokens, chance.choice([*LAYOUTS]))
    return made_layout(name, mask, size)
