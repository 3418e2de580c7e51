"""MoBA, an extension outside the library, against a dense softmax with its choice written out."""

import pytest
import torch
from torch import Tensor

from bmt_burst import Cache, Chunks, Layout, Mask, SequenceParallel, burst_attn_func, nn, simulate
from bmt_burst.extensions import read_extension, write_extension
from examples.moba import MoBA, main
from models.config import CPMConfig
from tests.cases import random_qkv

SMALL = MoBA(block_size=4, topk=2)
HEADS, KV_HEADS, SIZE = 4, 2, 8


def visible_pairs(q: Tensor, k: Tensor, mask: Mask, moba: MoBA) -> Tensor:
    """Return which keys each query head sees: (H, T, T) bool of q (T, H, D) and k (T, G, D)."""
    size, heads = moba.block_size, q.shape[1]
    visible = torch.zeros(heads, len(q), len(q), dtype=torch.bool)
    for start, stop in mask.parts:
        for i in range(start, stop):
            own = (i - start) // size
            at = start + own * size
            visible[:, i, at : i + 1] = True
            blocks = [slice(start + b * size, start + (b + 1) * size) for b in range(own)]
            for h in range(heads):
                means = [k[block, h * k.shape[1] // heads].mean(0) @ q[i, h] for block in blocks]
                for b in sorted(range(own), key=lambda b: -means[b])[: moba.topk]:
                    visible[h, i, blocks[b]] = True
    return visible


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the attention of one row, (1, T, H, D)."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def expected_of(inputs: list[Tensor], dout: Tensor, mask: Mask) -> list[Tensor]:
    """Return out, dq, dk and dv."""
    own = [x.clone().requires_grad_() for x in inputs]
    out = dense(*own, visible_pairs(inputs[0][0], inputs[1][0], mask, SMALL))
    return [out.detach(), *torch.autograd.grad(out, own, dout)]


MASKS = {
    "causal": Mask.causal(61),
    "documents": Mask.documents((0, 5, 9, 38, 61)),
    "borders": Mask.documents((0, 12, 36, 61)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_whole_sequences_equal_the_definition(ranks, mask):
    """Out and gradients, in a layout that is balanced by the mask, with spans of few tokens."""
    *inputs, dout = random_qkv(1, 61, HEADS, KV_HEADS, SIZE)
    layout = Layout.balanced(mask, ranks) if ranks % 2 else Layout.zigzag(61, ranks)

    def work(ring):
        own = [layout.shard(x, ring.rank, 1).requires_grad_() for x in inputs]
        options = {"layout": layout, "process_group": ring, "group_bytes": 3000}
        out = burst_attn_func(*own, mask=mask, sparse=SMALL, **options)
        return [out.detach(), *torch.autograd.grad(out, own, layout.shard(dout, ring.rank, 1))]

    results = zip(*simulate(ranks, work), strict=True)
    for parts, theirs in zip(results, expected_of(inputs, dout, mask), strict=True):
        assert (layout.unshard(list(parts), 1) - theirs).abs().max() < 1e-10


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chunks_and_new_tokens_equal_the_definition(ranks):
    mask = MASKS["borders"]
    *inputs, dout = random_qkv(1, 61, HEADS, KV_HEADS, SIZE)
    expected = expected_of(inputs, dout, mask)
    text = expected_of(inputs, dout, Mask.causal(61))[0]

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        chunks = Chunks(mask, 16, 1, sp)
        found = []
        for chunk in chunks.forward():
            chunk.attend(0, *map(chunk.shard, inputs), sparse=SMALL)
        for chunk in chunks.backward():
            own = [chunk.shard(x).requires_grad_() for x in inputs]
            out = chunk.attend(0, *own, sparse=SMALL)
            grads = torch.autograd.grad(out, own, chunk.shard(dout))
            found.append([out.detach(), *grads])
        whole = [torch.cat(parts[::-1], 1) for parts in zip(*found, strict=True)]
        cache, new = Cache(sp, 1, 61), []
        with torch.no_grad():
            for chunk in cache.prefill(37, 16):
                own = (chunk.shard(x[:, :37]) for x in inputs)
                chunk.attend(0, *own, sparse=SMALL)
            for start, stop in ((37, 38), (38, 50), (50, 61)):
                own = (x[:, start:stop] for x in inputs)
                new.append(cache.attend(0, *own, sparse=SMALL))
        return chunks.layout, whole, torch.cat(new, 1)

    layouts, wholes, news = zip(*simulate(ranks, work), strict=True)
    for parts, theirs in zip(zip(*wholes, strict=True), expected, strict=True):
        assert (layouts[0].unshard(list(parts), 1) - theirs).abs().max() < 1e-10
    assert all((new - text[:, 37:]).abs().max() < 1e-10 for new in news)


def test_a_configuration_names_it():
    values = {"kind": "moba", "block_size": 4, "topk": 2}
    assert read_extension(values) == SMALL
    assert write_extension(SMALL) == values
    config = CPMConfig(64, 32, 64, 2, 4, 2, 8, sparse=values)
    assert CPMConfig.from_dict(config.to_dict()) == config
    assert config.sparse == SMALL
    with pytest.raises(
        ValueError, match=r"unknown kind 'mob': expected one of \['infllm-v2', 'moba'"
    ):
        read_extension({"kind": "mob"})
    for layer in ({"window": 3}, {"softcap": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            nn.BurstAttention(32, 4, sparse=SMALL, **layer)


def test_the_example_trains_and_generates(capsys):
    main(6)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("loss of a token: ")
    before, after = (float(x) for x in (first.split()[4], first.split()[6]))
    assert after < before
    assert len(second.split()) == 9
