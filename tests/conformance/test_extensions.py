"""Extensions that choose keys by data, against the pairs that they see by definition, in float64.

A case has an extension, and a function that returns its pairs for whole sequences on one process.
To test your own, add a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bmt_burst import (
    Cache,
    Chunks,
    InfLLMV2,
    Layout,
    Mask,
    SequenceParallel,
    burst_attn_func,
    simulate,
)
from bmt_burst.sparse import choose
from bmt_burst.strategies.extension import Extension
from examples.moba import MoBA
from tests.cases import random_qkv
from tests.rings import ring_results

HEADS, KV_HEADS, SIZE = 4, 2, 8
CLOSE = 1e-10  # sums of some hundred products of numbers near 1, in float64


@dataclass(frozen=True)
class Case:
    """An extension with its definition.

    visible  returns (H, T, T) bool of q (T, H, D), k (T, G, D) and a mask: the keys that each query
             head sees
    tokens   of a sequence in which queries choose
    """

    extension: Extension
    visible: Callable[[Tensor, Tensor, Mask], Tensor]
    tokens: int


def moba_pairs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    size, visible = MOBA.block_size, torch.zeros(q.shape[1], len(q), len(q), dtype=torch.bool)
    ratio = q.shape[1] // k.shape[1]
    for start, stop in mask.parts:
        for i in range(start, stop):
            own = (i - start) // size
            visible[:, i, start + own * size : i + 1] = True
            blocks = [slice(start + b * size, start + (b + 1) * size) for b in range(own)]
            for h in range(q.shape[1]):
                scores = [k[block, h // ratio].mean(0) @ q[i, h] for block in blocks]
                for b in sorted(range(own), key=lambda b: -scores[b])[: MOBA.topk]:
                    visible[h, i, blocks[b]] = True
    return visible


def infllm_pairs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    chosen, size = choose(q, k, mask, INFLLM), INFLLM.block_size
    visible = torch.zeros(q.shape[1], len(q), len(q), dtype=torch.bool)
    ratio = q.shape[1] // k.shape[1]
    for start, stop in mask.parts:
        for i in range(start, stop):
            for h in range(q.shape[1]):
                for b in chosen[i, h // ratio].tolist():
                    if b >= 0:
                        visible[h, i, start + b * size : min(start + (b + 1) * size, i + 1)] = True
    return visible


MOBA = MoBA(block_size=4, topk=2)
INFLLM = InfLLMV2(block_size=8, kernel_size=4, kernel_stride=2, window_size=8, topk=2, dense_len=-1)
CASES = {
    "moba": Case(MOBA, moba_pairs, 61),
    "infllm-v2": Case(INFLLM, infllm_pairs, 113),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_size = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])


def documents(tokens: int, kind: str) -> Mask:
    """Return a mask of one document, of odd ones, or of ones at the borders of chunks of 16."""
    cuts = {"one": [], "odd": [5, 9, tokens // 2 + 3], "borders": [16, 48]}[kind]
    return Mask.documents((0, *cuts, tokens))


def expected_of(case: Case, mask: Mask, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of one row."""
    q, k, v, dout = tensors
    visible = case.visible(q[0], k[0], mask)
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in own[1:])
    scores = torch.einsum("bihd,bjhd->bhij", own[0], wide_k) * SIZE**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), wide_v)
    grads = torch.autograd.grad(out, own, dout)
    return [out.detach(), scores.logsumexp(-1).detach(), *grads]


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < CLOSE


@each_case
@each_size
@pytest.mark.parametrize("kind", ["one", "odd", "borders"])
def test_whole_sequences(case, ranks, kind):
    """In both layouts, with spans of few tokens and with one span, on a double ring if there is."""
    mask, tensors = documents(case.tokens, kind), random_qkv(1, case.tokens, HEADS, KV_HEADS, SIZE)
    expected = expected_of(case, mask, tensors)
    layouts = [Layout.zigzag(case.tokens, ranks), Layout.balanced(mask, ranks)]
    options = [{"group_bytes": 3000}, {"strategy": "all-gather"}]
    options[1] |= {"inner": 2} if ranks in (4, 8) else {}
    for layout, more in zip(layouts, options, strict=True):
        found = ring_results(layout, tensors, SIZE**-0.5, mask=mask, sparse=case.extension, **more)
        check_close(found[:5], expected)


@each_case
def test_strategies_of_what_is_near(case):
    mask, tensors = documents(case.tokens, "odd"), random_qkv(1, case.tokens, HEADS, KV_HEADS, SIZE)
    expected = expected_of(case, mask, tensors)
    for strategy in ("plain-ring", "ring", "ulysses"):
        layout = Layout.balanced(mask, 2)
        options = {"mask": mask, "sparse": case.extension, "strategy": strategy}
        check_close(ring_results(layout, tensors, SIZE**-0.5, **options)[:5], expected)


@each_case
def test_rows_have_documents_of_their_own(case):
    masks = [documents(case.tokens, kind) for kind in ("odd", "one")]
    tensors = random_qkv(2, case.tokens, HEADS, KV_HEADS, SIZE)
    rows = [tuple(x[i : i + 1] for x in tensors) for i in range(2)]
    each = [expected_of(case, *row) for row in zip(masks, rows, strict=True)]
    expected = [torch.cat(parts) for parts in zip(*each, strict=True)]
    layout = Layout.zigzag(case.tokens, 3)
    found = ring_results(layout, tensors, SIZE**-0.5, mask=masks, sparse=case.extension)
    check_close(found[:5], expected)


@each_case
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["odd", "borders"])
def test_chunks(case, ranks, kind):
    """Forward and backward, with documents across, at and within borders of chunks."""
    mask, tensors = documents(case.tokens, kind), random_qkv(1, case.tokens, HEADS, KV_HEADS, SIZE)
    out, _, *grads = expected_of(case, mask, tensors)

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        chunks, found = Chunks(mask, 16, 1, sp), []
        for chunk in chunks.forward():
            chunk.attend(0, *map(chunk.shard, tensors[:3]), sparse=case.extension)
        for chunk in chunks.backward():
            own = [chunk.shard(x).requires_grad_() for x in tensors[:3]]
            part = chunk.attend(0, *own, sparse=case.extension)
            found.append([part, *torch.autograd.grad(part, own, chunk.shard(tensors[3]))])
        joined = [torch.cat(parts[::-1], 1).detach() for parts in zip(*found, strict=True)]
        return chunks.layout, joined

    layouts, results = zip(*simulate(ranks, work), strict=True)
    found = [layouts[0].unshard(list(x), 1) for x in zip(*results, strict=True)]
    check_close(found, [out, *grads])


@each_case
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_prompts_and_new_tokens(case, ranks):
    """New tokens one at a time and several at once, after a prompt that ends within a block."""
    tensors = random_qkv(1, case.tokens, HEADS, KV_HEADS, SIZE)
    expected, _, *_ = expected_of(case, Mask.causal(case.tokens), tensors)
    prompt = case.tokens - 24

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        cache, found = Cache(sp, 1, case.tokens), []
        with torch.no_grad():
            for chunk in cache.prefill(prompt, 16):
                own = (chunk.shard(x[:, :prompt]) for x in tensors[:3])
                chunk.attend(0, *own, sparse=case.extension)
            for start, stop in ((0, 1), (1, 13), (13, 24)):
                own = (x[:, prompt + start : prompt + stop] for x in tensors[:3])
                found.append(cache.attend(0, *own, sparse=case.extension))
        return torch.cat(found, 1)

    for found in simulate(ranks, work):
        assert (found - expected[:, prompt:]).abs().max() < CLOSE


@each_case
def test_nan_stays_in_its_document(case):
    half = case.tokens // 2
    mask, layout = Mask.documents((0, half, case.tokens)), Layout.zigzag(case.tokens, 2)
    tensors = random_qkv(1, case.tokens, HEADS, KV_HEADS, SIZE)
    options = {"mask": mask, "sparse": case.extension}
    clean = ring_results(layout, tensors, SIZE**-0.5, **options)
    broken = [x.clone() for x in tensors]
    for x in broken:
        x[:, :half] = torch.nan
    found = ring_results(layout, broken, SIZE**-0.5, **options)
    for n in (0, 2, 3, 4):
        assert found[n][:, half:].equal(clean[n][:, half:])


@each_case
def test_what_excludes_it_is_refused_on_all_ranks(case):
    tensors = random_qkv(1, 24, HEADS, KV_HEADS, SIZE)[:3]
    tree = Mask.tree([8, 8, 8], [None, 0, 0])
    for options, message in (
        ({"causal": True, "softcap": 2.0}, "softcap"),
        ({}, "causal"),
        ({"mask": Mask.window(24, 5)}, "causal documents"),
        ({"mask": tree}, "causal documents"),
        ({"causal": True, "choose_by": (tensors[0],)}, "choose_by"),
    ):

        def work(ring, options=options):
            own = [Layout.zigzag(24, 2).shard(x, ring.rank, 1) for x in tensors]
            with pytest.raises((ValueError, TypeError)) as caught:
                burst_attn_func(*own, sparse=case.extension, process_group=ring, **options)
            return str(caught.value)

        texts = simulate(2, work)
        assert all(message in text for text in texts), texts
