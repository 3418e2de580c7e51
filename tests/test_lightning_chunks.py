"""Lightning attention in chunks: what ranks keep and send, and what a second run may not change.

tests/conformance/test_extensions.py compares it with its definition.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmt_burst import Chunks, Mask, SequenceParallel, simulate
from bmt_burst.lightning.memory import Lightning
from bmt_burst.lightning.segments import cut_documents
from bmt_burst.sparse import keep_choices
from tests.lightning import SLOPES, expected_results, random_tensors, worst_error
from tests.refusals import refusal, refusal_of_rank

SCALE = 0.31
KIND = Lightning(SLOPES, SCALE)


def make_chunks(ring, masks, tokens: int, layout: str = "zigzag") -> Chunks:
    sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
    return Chunks(masks, tokens, 1, sp, layout=layout)


def run_forward(chunks: Chunks, tensors, kind: Lightning = KIND) -> list[Tensor | None]:
    """Return the states before each chunk."""
    for chunk in chunks.forward():
        chunk.mix(0, kind, *map(chunk.shard, tensors[:3]))
    return [*chunks._memories[0].states]


@contextmanager
def begin_backward(chunks: Chunks, tensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield out of the last chunk and its gradient, after the forward of the others."""
    run_forward(chunks, tensors)
    with closing(chunks.backward()) as loop:
        chunk = next(loop)
        *qkv, dout = map(chunk.shard, tensors)
        yield chunk.mix(0, KIND, *(x.requires_grad_() for x in qkv)), dout


def in_chunks(size, masks, tokens, tensors, run=None, kind=KIND, **options):
    """Return the whole out, dq, dk and dv, the states of a rank, and what each rank sent.

    States must be identical on all ranks.
    """

    def work(ring):
        chunks, found = make_chunks(ring, masks, tokens, **options), []
        states = run_forward(chunks, tensors, kind)
        for chunk in chunks.backward():
            *leaves, dout = map(chunk.shard, tensors)
            leaves = [x.requires_grad_() for x in leaves]
            attend = functools.partial(chunk.mix, 0, kind)
            out = run(attend, *leaves) if run else attend(*leaves)
            out.backward(dout)
            found.insert(0, [out.detach(), *(x.grad for x in leaves)])
        whole = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
        return whole, states, chunks.layout, ring.traffic

    results, states, layouts, traffic = zip(*simulate(size, work), strict=True)
    for of_rank in states[1:]:
        assert all(map(is_same, states[0], of_rank))
    whole = [layouts[0].unshard(parts) for parts in zip(*results, strict=True)]
    return whole, states[0], traffic


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.equal(other)


def cut(*borders: int) -> Mask:
    return Mask.documents(borders)


def test_what_is_kept_and_sent():
    """A border in a document keeps a state, else 0. None is sent where documents end at borders."""
    tensors, _ = random_tensors(2, 48)
    _, states, _ = in_chunks(2, [cut(0, 16, 48), cut(0, 32, 48)], 16, tensors)
    assert states[0] is None and [x.shape for x in states[1:]] == [(2, 4, 4, 4)] * 2
    assert not states[1][0].any() and states[1][1].any() and states[2][0].any()
    assert not states[2][1].any()
    masks = [cut(0, 8, 16, 24, 32, 40, 48)]
    tensors, _ = random_tensors(1, 48)
    _, states, traffic = in_chunks(2, masks, 16, tensors, layout="contiguous")
    state_bytes = 4 * 4 * 4 * 8
    assert set(states) == {None}
    assert all(nbytes < state_bytes for sent in traffic for _, nbytes in sent)


@pytest.mark.parametrize(
    ("span", "borders", "before", "after"),
    [
        ((0, 10), (0, 4, 10), False, False),
        ((3, 12), (0, 1, 7, 9), True, True),
        ((11, 19), (0, 8), True, True),
        ((20, 32), (0, 12), False, False),
    ],
)
def test_documents_are_cut_at_the_edges_of_a_chunk(span, borders, before, after):
    mask = cut(0, 4, 10, 20, 32)
    assert cut_documents((mask,), *span) == ((cut(*borders),), ((before,), (after,)))
    both = cut_documents((mask, cut(0, 32)), *span)
    assert both == (
        (cut(*borders), cut(0, borders[-1])),
        ((before, span[0] > 0), (after, span[1] < 32)),
    )


def test_a_prompt_goes_on_and_windows_are_refused():
    assert cut_documents((cut(0, 8),), 4, 8, True) == ((cut(0, 4),), ((True,), (True,)))
    with refusal("ValueError: lightning attention needs causal documents"):
        cut_documents((Mask.window(32, 4),), 0, 8)


# guards


def test_a_second_backward_is_refused():
    tensors, _ = random_tensors(1, 32)

    def work(ring):
        chunks = make_chunks(ring, cut(0, 32), 16)
        with begin_backward(chunks, tensors) as (out, dout):
            out.backward(dout, retain_graph=True)
            with refusal("ValueError: ran twice|got two"):
                out.backward(dout)

    simulate(2, work)


def test_a_backward_that_may_not_begin_raises_on_all_ranks():
    tensors, _ = random_tensors(1, 32)

    def begin():
        raise ValueError("expected one backward of chunk 1")

    def work(ring):
        chunks = make_chunks(ring, cut(0, 32), 16)
        with begin_backward(chunks, tensors) as (out, dout):
            if ring.rank:
                chunks._memories[0].past.begin = begin
            with refusal_of_rank(1, ring.rank, "ValueError: expected one backward of chunk 1"):
                out.backward(dout)

    simulate(2, work)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_second_run_that_differs_is_found(dtype):
    """As with dropout, in 16 bits too. Rounding is not."""
    tensors, _ = random_tensors(1, 512, 8)
    first, chance = [x.to(dtype) for x in tensors], torch.Generator().manual_seed(1)
    kept = torch.rand(first[0].shape, generator=chance) > 0.1
    noise = 1 + torch.finfo(dtype).eps * torch.randint(-1, 2, first[0].shape).to(dtype)

    def work(ring, factor):
        chunks = make_chunks(ring, cut(0, 512), 256)
        run_forward(chunks, first)
        for chunk in chunks.backward():
            *qkv, dout = map(chunk.shard, first)
            if chunk.number == 0:
                qkv = [x * chunk.shard(factor) for x in qkv]
            chunk.mix(0, KIND, *(x.detach().requires_grad_() for x in qkv)).backward(dout)

    for factor, is_found in (((kept / 0.9).to(dtype), True), (noise, False)):
        differs = refusal("ValueError: states of chunk 0 differ from what the forward kept")
        with differs if is_found else nullcontext():
            simulate(2, functools.partial(work, factor=factor))


def test_checkpointed_chunks_send_no_state_twice():
    """The recomputation takes the states of the second run, which exchanged them."""
    tensors, _ = random_tensors(2, 48)
    masks = [cut(0, 5, 40, 48), cut(0, 32, 48)]

    def run(attend, *qkv):
        return checkpoint(attend, *qkv, use_reentrant=False, context_fn=keep_choices)

    plain, _, sent = in_chunks(2, masks, 16, tensors)
    again, _, resent = in_chunks(2, masks, 16, tensors, run)
    assert all(x.equal(y) for x, y in zip(plain, again, strict=True))
    assert sent == resent


def test_other_edges_are_refused_on_all_ranks():
    """Ranks have the same documents in the chunk."""
    tensors, _ = random_tensors(1, 32)

    def work(ring):
        chunks = make_chunks(ring, cut(0, 16, 32) if ring.rank else cut(0, 32), 16)
        with refusal("ValueError: ranks differ in documents of other chunks"):
            run_forward(chunks, tensors)

    simulate(2, work)


def test_the_triton_kernel_takes_edges(monkeypatch):
    """In Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    from bmt_burst.lightning import triton_kernel

    monkeypatch.setattr(triton_kernel, "refuses", lambda q, tokens_choose: None)
    tensors, slopes = random_tensors(1, 48, 16, 2)
    rounded = [x.float() for x in tensors]
    masks = [cut(0, 20, 48)]
    expected = expected_results([x.double() for x in rounded], slopes, SCALE, masks)
    kind = Lightning(tuple(slopes.tolist()), SCALE, "triton")
    got, states, _ = in_chunks(1, masks, 16, rounded, kind=kind)
    assert {x.dtype for x in (*got, *filter(torch.is_tensor, states))} == {torch.float32}
    assert worst_error([x.double() for x in got], expected) < 1e-5
