"""Lightning attention in chunks over ranks: equal to the recurrence over the whole sequence."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmt_burst import Layout, Mask, simulate
from bmt_burst.base.kept import find_difference
from bmt_burst.lightning import reference
from bmt_burst.lightning.attention import attend_lightning
from bmt_burst.lightning.plan import PastStates
from bmt_burst.lightning.segments import Edges, cut_documents
from bmt_burst.ranks.rings import make_rings
from bmt_burst.ranks.sequence_parallel import WholeSequence
from bmt_burst.sparse import keep_choices
from tests.lightning import expected_results, random_log_decay, random_tensors, worst_error
from tests.refusals import refusal, refusal_of_rank
from tests.rings import ring_arguments

EXACT = 1e-10
SCALE = 0.31


class Rank:
    """A rank that computes a sequence in chunks. `masks` has one for each row, or one for all."""

    def __init__(
        self,
        ring,
        masks: Sequence[Mask],
        tokens: int,
        layout: str = "zigzag",
        inner: int | None = None,
        goes_on: bool = False,
        flash: str = "auto",
    ):
        groups = ring_arguments(ring, inner or ring.size)
        hosts = groups.get("double_group", (None, None))
        self.rings = make_rings(groups.get("process_group"), hosts)
        self.masks, self.goes_on, self.flash, self.ring = masks, goes_on, flash, ring
        self.layout = Layout.chunks(masks[0].seq_len, ring.size, tokens, layout)
        self.count = len(self.layout.spans)
        self.states: list[Tensor | None] = [None]  # before each chunk
        self.gradient: Tensor | None = None  # of the state after the chunk whose backward is next
        self.begun: list[int] = []

    def cut(self, number: int) -> tuple[tuple[Mask, ...], Edges]:
        return cut_documents(tuple(self.masks), *self.layout.spans[number], self.goes_on)

    def edges(self, number: int) -> Edges:
        return self.cut(number)[1]

    def shard(self, x: Tensor, number: int) -> Tensor:
        return self.layout.layouts[number].shard(
            x[:, slice(*self.layout.spans[number])], self.ring.rank
        )

    def attend(
        self, number, inputs: Sequence[Tensor], slopes: Tensor | None, past: PastStates
    ) -> Tensor:
        """Return out of a chunk, of q, k, v and, without slopes, a log_decay."""
        qkv, log_decay = inputs[:3], None if slopes is not None else inputs[3]
        masks, _ = self.cut(number)
        mask = masks if len(masks) > 1 else masks[0]
        sequence = WholeSequence.local(mask, self.layout.layouts[number])
        return attend_lightning(
            self.rings, sequence, *qkv, slopes, SCALE, self.flash, past, log_decay
        )

    def run_forward(self, tensors, slopes) -> list[Tensor]:
        """Return out of each chunk, and keep the states before and after."""
        outs = []
        for number in range(self.count):
            with torch.no_grad():
                past = PastStates(self.edges(number), self.states[-1])
                inputs = [self.shard(x, number) for x in tensors[:-1]]
                outs.append(self.attend(number, inputs, slopes, past))
                self.states.append(past.final)
        return outs

    def reopen(self, number: int) -> PastStates:
        """Return the past of the second run of a chunk."""
        begin = functools.partial(self.begun.append, number)
        return PastStates(self.edges(number), self.states[number], begin, dfinal=self.gradient)

    def run_backward(self, number: int, tensors, slopes, run=None) -> list[Tensor]:
        """Return out and the gradients of all tensors but the last, which is dout."""
        *inputs, dout = (self.shard(x, number) for x in tensors)
        leaves, past = [x.requires_grad_() for x in inputs], self.reopen(number)

        def attend(*inputs):
            return self.attend(number, inputs, slopes, past)

        out = run(attend, *leaves) if run else attend(*leaves)
        assert is_same(past.final, self.states[number + 1]), "both runs have the same bits"
        out.backward(dout)
        self.gradient = past.dinitial
        return [out.detach(), *(x.grad for x in leaves)]


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.equal(other)


def in_chunks(size, masks, tokens, tensors, slopes, run=None, **options):
    """Return whole out and gradients. States and their gradients must be identical on all ranks,
    in each chunk.
    """

    def work(ring):
        rank = Rank(ring, masks, tokens, **options)
        rank.run_forward(tensors, slopes)
        edges, results = [*rank.states], list[list[Tensor]]()
        for number in reversed(range(rank.count)):
            results.append(rank.run_backward(number, tensors, slopes, run))
            edges.append(rank.gradient)
        assert rank.begun == [*reversed(range(rank.count))]
        whole = [torch.cat(parts, 1) for parts in zip(*results[::-1], strict=True)]
        return whole, edges, rank.layout, ring.traffic

    results = simulate(size, work)
    for of_rank in results[1:]:
        assert all(map(is_same, results[0][1], of_rank[1]))
    layout = results[0][2]
    parts = zip(*(found for found, *_ in results), strict=True)
    return [layout.unshard(list(x)) for x in parts], results


def cut(*borders: int) -> Mask:
    return Mask.documents(borders)


def random_rows(chance: random.Random, tokens: int, chunk: int) -> list[Mask]:
    """Return rows of documents that begin anywhere, or at borders of chunks and next to them."""
    edges = [x for n in range(chunk, tokens, chunk) for x in (n - 1, n, n + 1) if 0 < x < tokens]
    rows = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = chance.choice((range(1, tokens), edges, range(1, tokens, chunk)))
        begins = chance.sample([*places], min(len(places), chance.choice((0, 0, 1, 2, 5))))
        rows.append(cut(0, *sorted(begins), tokens))
    return rows


RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (6, 3), (4, 1)]  # and ranks of a host


@pytest.mark.parametrize("tokens_choose", [False, True], ids=["slopes", "log_decay"])
def test_chunks_equal_the_recurrence(tokens_choose, monkeypatch):
    """On 1 to 8 ranks and hosts, whatever the rows, documents, borders and layout in a chunk."""
    for seed, (size, inner) in itertools.product(range(2), RINGS):
        chance = random.Random(100 * seed + size + inner)
        monkeypatch.setattr(reference, "CHUNK", (5, 64)[seed % 2])
        tokens = chance.randint(3 * size, 48)
        most = chance.randint(size + tokens // 8, tokens)
        most = -(-tokens // max(min(-(-tokens // most), tokens // size), 1))
        masks = random_rows(chance, tokens, most)
        batch = 2 if len(masks) == 1 and chance.random() < 0.5 else len(masks)
        tensors, slopes = random_tensors(batch, tokens)
        rates = random_log_decay(batch, tokens) if tokens_choose else slopes
        expected = expected_results(tensors, rates, SCALE, masks * (batch // len(masks)))
        if tokens_choose:
            tensors, slopes = (*tensors[:3], rates, tensors[3]), None
        layout = chance.choice(("zigzag", "contiguous"))
        got, _ = in_chunks(size, masks, most, tensors, slopes, layout=layout, inner=inner)
        assert worst_error(got, expected) < EXACT, (seed, size, inner, masks, most, layout)


def test_single_precision():
    tensors, slopes = random_tensors(1, 96, 8)
    rounded = [x.float() for x in tensors]
    masks = [cut(0, 10, 70, 96)]
    expected = expected_results([x.double() for x in rounded], slopes, SCALE, masks)
    got, results = in_chunks(3, masks, 24, rounded, slopes)
    assert {x.dtype for x in (*got, *filter(torch.is_tensor, results[0][1]))} == {torch.float32}
    assert worst_error([x.double() for x in got], expected) < 1e-5


def test_what_is_kept_and_sent():
    """A state for each border within a document: a row that ends there keeps 0. Nothing is sent
    where documents end at the borders of runs.
    """
    tensors, slopes = random_tensors(2, 48)
    _, results = in_chunks(2, [cut(0, 16, 48), cut(0, 32, 48)], 16, tensors, slopes)
    states = results[0][1]
    assert states[0] is None and [x.shape for x in states[1:3]] == [(2, 4, 4, 4)] * 2
    assert not states[1][0].any() and states[1][1].any() and states[2][0].any()
    assert not states[2][1].any()
    masks = [cut(0, 8, 16, 24, 32, 40, 48)]
    tensors, slopes = random_tensors(1, 48)
    _, results = in_chunks(2, masks, 16, tensors, slopes, layout="contiguous")
    assert set(results[0][1]) == {None} and not any(traffic for *_, traffic in results)


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


def test_a_second_backward_is_refused_and_the_graph_lets_states_go():
    tensors, slopes = random_tensors(1, 32)

    def work(ring):
        rank = Rank(ring, [cut(0, 32)], 16)
        rank.run_forward(tensors, slopes)
        past = PastStates(rank.edges(1), rank.states[1], lambda: None)
        *qkv, dout = (rank.shard(x, 1) for x in tensors)
        out = rank.attend(1, [x.requires_grad_() for x in qkv], slopes, past)
        out.backward(dout, retain_graph=True)
        held = weakref.ref(past)
        del past
        gc.collect()
        assert held() is None
        with refusal("ValueError: the backward of a chunk ran twice"):
            out.backward(dout)
        out = rank.attend(1, qkv, slopes, PastStates(rank.edges(1), rank.states[1]))
        with refusal(r"ValueError: a chunk of forward\(\) or of a prefill has no backward"):
            out.backward(dout)

    simulate(2, work)


def test_a_backward_that_may_not_begin_raises_on_all_ranks():
    tensors, slopes = random_tensors(1, 32)

    def work(ring):
        def begin():
            if ring.rank:
                raise ValueError("expected one backward of chunk 1")

        rank = Rank(ring, [cut(0, 32)], 16)
        rank.run_forward(tensors, slopes)
        past = PastStates(rank.edges(1), rank.states[1], begin)
        *qkv, dout = (rank.shard(x, 1) for x in tensors)
        out = rank.attend(1, [x.requires_grad_() for x in qkv], slopes, past)
        with refusal_of_rank(1, ring.rank, "ValueError: expected one backward of chunk 1"):
            out.backward(dout)

    simulate(2, work)


def test_a_second_run_that_differs_is_found():
    """As with dropout, in 16 bits too. Rounding is not."""
    tensors, slopes = random_tensors(1, 512, 8)

    def work(ring, dtype, change):
        rank = Rank(ring, [cut(0, 512)], 256)
        first = [x.to(dtype) for x in tensors]
        rank.run_forward(first, slopes)
        past = rank.reopen(0)
        rank.attend(0, [rank.shard(change(x), 0) for x in first[:3]], slopes, past)
        return find_difference(past.final, rank.states[1], dtype)

    def drop(x):
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.1
        return x * kept / 0.9

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        noise = 1 + eps * torch.randint(-1, 2, (1, 512, 4, 8)).to(dtype)
        for change, is_found in ((drop, True), (lambda x, by=noise: x * by, False)):
            found = simulate(2, lambda ring, d=dtype, c=change: work(ring, d, c))
            assert found[0].equal(found[1])
            assert bool(found[0] > 1) == is_found, (dtype, found[0])


def test_checkpointed_chunks_send_no_state_twice():
    """The recomputation takes the states of the second run, which exchanged them."""
    tensors, slopes = random_tensors(2, 48)
    masks = [cut(0, 5, 40, 48), cut(0, 32, 48)]

    def run(attend, *qkv):
        return checkpoint(attend, *qkv, use_reentrant=False, context_fn=keep_choices)

    plain, sent = in_chunks(2, masks, 16, tensors, slopes)
    again, resent = in_chunks(2, masks, 16, tensors, slopes, run)
    assert all(x.equal(y) for x, y in zip(plain, again, strict=True))
    assert [traffic for *_, traffic in sent] == [traffic for *_, traffic in resent]


def test_other_edges_are_refused_on_all_ranks():
    tensors, slopes = random_tensors(1, 32)

    def work(ring):
        rank = Rank(ring, [cut(0, 32)], 16)
        qkv = [rank.shard(x, 1) for x in tensors[:3]]
        edges, state = rank.edges(1), torch.zeros(1, 4, 4, 4, dtype=torch.float64)
        other = Edges((True,), (True,)) if ring.rank else edges
        with refusal("ValueError: ranks differ in documents of other chunks"):
            rank.attend(1, qkv, slopes, PastStates(other, state))
        return rank.attend(1, qkv, slopes, PastStates(edges, state))

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
    got, _ = in_chunks(1, masks, 16, rounded, slopes, flash="triton")
    assert worst_error([x.double() for x in got], expected) < 1e-5
