"""Attention with a table of biases equals dense attention, over any ranks; so do gradients."""

import itertools
import math
import pickle
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bmt_burst import Layout, Mask, Slice, burst_attn_func, scores, simulate
from bmt_burst.bias import areas, extension
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.scoring import TableScoring
from bmt_burst.kernels import load
from bmt_burst.scores import BY_DISTANCE, Scores
from bmt_burst.sequence.gathered_calls import GatheredCall
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.strategies.ring import Program, RingPlan
from tests.cases import random_layout, random_mask, random_qkv
from tests.reference import assert_close, dense_results
from tests.refusals import refusal
from tests.rings import CPU_KERNELS, ring_results

RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (6, 3), (4, 1)]
CASES = 24
OTHER = 3
SCALE = 0.31


def cuts(chance, tokens, most):
    return sorted({0, tokens, *(chance.randint(1, tokens) for _ in range(chance.randint(0, most)))})


def random_scores(chance: random.Random, mask: Mask, rows: int) -> Scores:
    """Groups of segments; a group's segments are some rows to each other, and by distance to
    themselves.

    Now and then they recur, one among the other.
    """
    runs, pairs = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts(chance, mask.seq_len, 2))):
        inside = cuts(chance, stop - start, 3)
        count, first = len(inside) - 1, len(pairs)
        for index, (a, b) in enumerate(itertools.pairwise(inside)):
            runs.append((b - a, number, first + index * count, index))
        for a, b in itertools.product(range(count), repeat=2):
            pairs.append(BY_DISTANCE if a == b or chance.random() < 0.1 else chance.randrange(rows))
    if chance.random() < 0.3:
        runs = [(length, *chance.choice(runs)[1:]) for length, *_ in runs]
    lengths, *numbers = torch.tensor(runs).T
    tokens = (x.int().repeat_interleave(lengths) for x in numbers)
    distances = [chance.randrange(rows) for _ in range(2 * chance.randint(0, 9) + 1)]
    return Scores(mask, *tokens, *map(integers, (pairs, distances)), OTHER)


def integers(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def small_scores(**changes) -> Scores:
    """Return scores of six tokens: a group of two segments, and a group of one."""
    fields = {
        "mask": Mask.causal(6),
        "group": integers([0, 0, 0, 0, 1, 1]),
        "base": integers([0, 0, 2, 2, 4, 4]),
        "segment": integers([0, 0, 1, 1, 0, 0]),
        "pairs": integers([BY_DISTANCE, 5, 6, BY_DISTANCE, BY_DISTANCE]),
        "distances": integers([0, 1, 2]),
        "other": 7,
    }
    return Scores(**{**fields, **changes})


@pytest.mark.parametrize("mask", [Mask.full(24), Mask.causal(24)])
def test_pairs_of_two_long_groups_are_one_area(mask, monkeypatch):
    """Each token is a segment here. A short group between them has no area."""
    monkeypatch.setattr(areas, "_LONG", 8)
    group = integers([0] * 10 + [1] * 4 + [2] * 10)
    segment = integers([*range(10), *range(4), *range(10)])
    added = Scores(mask, group, 10 * segment, segment, integers([5] * 100), integers([0]), OTHER)
    masks = {term.row: term.mask for term in added.terms}
    both = torch.zeros(24, 24, dtype=torch.bool)
    both[:10, 14:] = both[14:, :10] = True
    assert masks.keys() == {None, OTHER}
    assert masks[OTHER].dense().equal(both & mask.dense())


def test_tokens_that_nobody_sees_in_areas_of_one_row_may_hold_nan(monkeypatch):
    """They may lie in a gap between tiles of a call. The reference multiplies them by 0, and the
    bound of a table's gradient counts them in calls with a row for each pair.
    """
    monkeypatch.setattr(areas, "_LONG", 4)
    segments = integers([0] * 20 + [1] * 10)
    pairs = integers([BY_DISTANCE, 1, 1, BY_DISTANCE])
    mask = Mask(30, (Slice((20, 25), (0, 8)), Slice((25, 30), (14, 20))))
    added = Scores(mask, 0 * segments, 0 * segments, segments, pairs, integers([0]), OTHER)
    hidden = ~mask.dense().any(0)
    assert 0 < hidden.sum() < 30
    *tensors, dout = random_qkv(1, 30, 4, 4, 8)
    table = torch.randn(OTHER + 1, 4, dtype=torch.float64)
    found = []
    for filling in (0.0, torch.nan):
        q, k, v = (x.clone() for x in tensors)
        k[:, hidden] = v[:, hidden] = filling
        inputs = [x.requires_grad_() for x in (q, k, v, table.clone())]
        out = burst_attn_func(*inputs[:3], scores=added, bias=inputs[3], flash="cpu")
        found.append(torch.autograd.grad(out, inputs, dout))
    assert all(a.isfinite().all() and a.equal(b) for a, b in zip(*found, strict=True))


def test_any_scores_equal_dense(monkeypatch):
    """In fp64, over any ranks, masks, layouts and strategies; with areas of one row or without."""
    for seed in range(CASES):
        chance = random.Random(seed)
        monkeypatch.setattr(areas, "_LONG", chance.choice((1, 4, 1024)))
        monkeypatch.setattr(areas, "_MOST_TERMS", chance.choice((2, 16)))
        size, inner = RINGS[seed % len(RINGS)]
        mask = random_mask(chance, chance.randint(size, 60))
        layout = random_layout(chance, mask, size)
        heads, kv_heads = chance.choice(((3, 3), (2, 2), (4, 2)))
        tensors = random_qkv(chance.choice((1, 2)), mask.seq_len, heads, kv_heads, 8, seed=seed)
        added = random_scores(chance, mask, rows=11)
        bias = torch.randn(11, heads, dtype=torch.float64)
        options = {
            "scores": added,
            "strategy": chance.choice(("ring", "ring", "ulysses" if inner == size else "usp")),
            "backward": chance.choice(("q", "kv")),
            "flash": chance.choice(CPU_KERNELS),
            "group_bytes": chance.choice((0, 5_000, 1 << 30)),
        }
        got = ring_results(layout, tensors, SCALE, inner, bias=bias, **options)
        expected = dense_results(mask, tensors, SCALE, added.dense(), bias)
        assert_close(got, expected, tensors[3], SCALE, 1e-10, (seed, layout, options))


def test_positions_rise_by_one_in_tiles_that_go_by_distance(monkeypatch):
    """Kernels count on it. Other calls, as of striped layouts, have no row. `apart` is exact."""
    monkeypatch.setattr(areas, "_LONG", 1)
    evens = set()
    sizes = Sizes(1, 2, 2, 8, torch.float32, torch.float32)
    for seed in range(40):
        chance = random.Random(seed)
        size, inner = chance.choice(((4, 4), (8, 8), (6, 3)))
        mask = random_mask(chance, chance.randint(20, 60))
        reach = chance.randint(1, 60)
        added = Scores.by_distance(mask, torch.zeros(2 * reach + 1, dtype=torch.int32))
        layout = chance.choice((Layout.striped, Layout.striped, Layout.zigzag))(mask.seq_len, size)
        problem = Problem(mask, layout, Spec(1.0), load("reference"), sizes, inner, size // inner)
        scoring = TableScoring(added, bias_kernels.load("reference"))
        problem = replace(problem, backward=chance.choice(("q", "kv")), scoring=scoring)
        for program in (program for rank in range(size) for program in programs(problem, rank)):
            for key, cuts in {None: program.own, **program.calls}.items():
                for cut in (cut for cut in cuts if not cut.label.is_one):
                    tiles = positions(cut)
                    even = all((x.diff() == 1).all() for tile in tiles for x in tile)
                    apart = tuple(int(kv[0] - q[0]) for q, kv in tiles)
                    expected = (BY_DISTANCE, apart) if even else (None, None)
                    assert cut.label[:2] == expected, (seed, key, cut)
                    evens.add(even)
    assert evens == {True, False}


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_what_biased_calls_share(backward, monkeypatch):
    """For each heads what kernels keep for a table. Padding has no say."""
    kernel, found = type(bias_kernels.load("reference")), []

    def watched(self, dout, q, k, v, out, lse, delta, call, spec, bias):
        found.append((bias.prepared, bias.table))
        return plain(self, dout, q, k, v, out, lse, delta, call, spec, bias)

    plain = kernel.backward
    monkeypatch.setattr(kernel, "backward", watched)
    mask = Mask(40, (Slice((0, 33), (0, 33), 0),))
    added = Scores.by_distance(mask, torch.arange(9, dtype=torch.int32))
    tensors = random_qkv(1, 40, 2, 2, 8)
    for x in tensors:
        x[:, 33:] = torch.nan
    bias = torch.randn(9, 2, dtype=torch.float64)
    options = {"flash": "reference", "backward": backward, "group_bytes": 0}
    *_, dbias = ring_results(
        Layout.contiguous(40, 4), tensors, SCALE, scores=added, bias=bias, **options
    )
    assert dbias.isfinite().all()
    # Of each of four ranks: one for its own block, and one for each of the two heads that go round
    # alone.
    tables = {id(prepared): table for prepared, table in found}
    assert len(found) > len(tables) == 4 + 3 * 2, (len(found), len(tables))
    assert all(tables[id(prepared)] is table for prepared, table in found)


def programs(problem: Problem, rank: int) -> tuple[Program, Program]:
    plan = RingPlan(problem, rank)
    return plan.forward_program, plan.backward_program


def positions(cut: GatheredCall) -> list[tuple[torch.Tensor, ...]]:
    """Return the positions of each tile's queries and keys."""
    sides = zip(cut.label.sides, (cut.q_spans, cut.kv_spans), strict=True)
    rows, columns = (torch.cat([x[slice(*span)] for span in spans]) for x, spans in sides)
    return [(rows[slice(*q)], columns[slice(*kv)]) for q, kv in cut.call.tiles]


WRONG = [
    ({"mask": None}, "TypeError: mask must be a Mask, got NoneType"),
    ({"pairs": [1]}, "TypeError: pairs must be a torch.Tensor, got list"),
    ({"pairs": torch.zeros(5).long()}, "TypeError: pairs must be int32 of one dimension"),
    ({"group": integers([[0] * 6])}, "TypeError: group must be int32 of one dimension on"),
    ({"segment": integers([0])}, "ValueError: segment has 1 numbers for a mask of 6 tokens"),
    ({"distances": integers([1, 2])}, r"ValueError: distances must be .*, an odd number, got 2"),
    ({"pairs": integers([-2] * 5)}, "ValueError: other must be rows of a table, 0 or more, got -2"),
    (
        {"base": integers([0, 0, 2, 2, 5, 5])},
        r"ValueError: pairs must have entries 0 to 5, for each base \+ segment, got 5 entries",
    ),
    ({"other": -1}, "ValueError: other must be rows of a table, 0 or more, got -1"),
    ({"other": 1 << 70}, r"ValueError: below 2\^31; got a number of 71 bits"),
]


@pytest.mark.parametrize(("changes", "error"), WRONG)
def test_wrong_scores_are_refused(changes, error):
    with refusal(error):
        small_scores(**changes)


@pytest.mark.parametrize(
    "numbers", [[-1, -1, -1, -1, 0, 0], [(1 << 31) - 1] * 4 + [-(1 << 31)] * 2]
)
def test_sequences_are_stacked_whatever_numbers_their_groups_have(numbers):
    each = [small_scores(), small_scores(group=integers(numbers))]
    stacked = Scores.stacked(each)
    assert stacked.seq_len == 12
    assert stacked.dense()[:6, :6].equal(each[0].dense())
    assert stacked.dense()[6:, 6:].equal(each[1].dense())
    assert stacked.dense()[:6, 6:].eq(7).all()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "ValueError: expected at least one mask to stack"),
        ([{}, None], "TypeError: scores of several sequences must be Scores, got NoneType"),
        ([{}, {"other": 6}], "ValueError: must have the same distances and the same other row"),
    ],
)
def test_sequences_that_cannot_be_stacked_are_refused(given, error):
    with refusal(error):
        Scores.stacked([x if x is None else small_scores(**x) for x in given])


@pytest.mark.parametrize("name", ["group", "base", "segment", "pairs", "distances"])
def test_what_is_written_to_a_tensor_of_scores_does_not_change_them(name):
    """Neither to the tensor that was passed, nor to the one that is read, nor to numpy's view."""
    before = small_scores()
    passed = getattr(before, name)
    added, digest = small_scores(**{name: passed}), before.digest
    passed.fill_(7)
    getattr(added, name).fill_(7)
    getattr(added, name).numpy()[:] = 7
    assert getattr(added, name).equal(getattr(before, name))
    assert added.digest == digest
    assert added.dense().equal(before.dense())
    copied = pickle.loads(pickle.dumps(replace(added, other=6)))
    assert getattr(copied, name).equal(getattr(before, name))


def test_scores_that_were_made_ahead_are_the_same(monkeypatch):
    """A data loader makes them ahead, with the parts that were found."""
    monkeypatch.setattr(areas, "_LONG", 2)
    added = small_scores()
    assert len(added.terms) == 4
    read = pickle.loads(pickle.dumps(added))
    assert read == added
    assert vars(read)["terms"] == added.terms


def test_buckets_of_distances():
    assert scores.distance_rows(8, 4).tolist() == [3, 2, 1, 0, 5, 6, 7]
    with pytest.raises(ValueError, match="a max_distance above 1, got 6"):
        scores.distance_rows(6, 1)
    with pytest.raises(TypeError, match=r"num_buckets must be a whole number, got 4\.5"):
        scores.distance_rows(4.5, 9)


def two_groups(mask: Mask) -> Scores:
    """Return scores of two groups of six tokens: by distance in a group, OTHER between them."""
    group, nothing = integers([0] * 6 + [1] * 6), integers([0] * 12)
    pairs, distances = integers([BY_DISTANCE]), integers([0, 1, 2])
    return Scores(mask, group, nothing, nothing, pairs, distances, OTHER)


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_bias_that_is_not_finite_is_not_hidden(flash, strategy, monkeypatch):
    """Also where a query sees only one area of the row."""
    monkeypatch.setattr(areas, "_LONG", 1)
    tensors = random_qkv(1, 12, 2, 2, 8, torch.float32)
    masks = Mask.full(12), Mask.causal(12), Mask(12, (Slice((0, 6), (6, 12)),))
    for mask, value, size in itertools.product(masks, (math.inf, math.nan), (1, 2)):
        added, bias = two_groups(mask), torch.zeros(4, 2)
        bias[OTHER, 0] = value
        options = {"scores": added, "strategy": strategy, "flash": flash}
        layout = Layout.zigzag(12, size)
        out, _, dq, *_, dbias = ring_results(layout, tensors, SCALE, bias=bias, **options)
        expected = dense_results(mask, tensors, SCALE, added.dense(), bias)[0].isnan()
        assert expected.any()
        assert out.isnan().equal(expected)
        assert dq.isnan().equal(expected)
        assert dbias[OTHER].isnan().tolist() == [True, False]


@pytest.mark.parametrize("flash", CPU_KERNELS)
def test_rows_of_minus_infinity_count_for_nothing(flash, monkeypatch):
    """A query that sees only such rows has no lse and no gradient. Its out is not defined."""
    monkeypatch.setattr(areas, "_LONG", 1)
    added, bias = small_scores(mask=Mask.full(6)), torch.zeros(8, 2, dtype=torch.float64)
    bias[5:8, 0] = -math.inf
    tensors, options = random_qkv(1, 6, 2, 2, 8), {"flash": flash, "bias": bias}
    got = ring_results(Layout.zigzag(6, 2), tensors, SCALE, scores=added, **options)
    expected = dense_results(added.mask, tensors, SCALE, added.dense(), bias)
    assert all(torch.allclose(mine, exact) for mine, exact in zip(got, expected, strict=True))
    bias = torch.zeros(4, 2)
    bias[OTHER, 0] = -math.inf
    tensors, layout = random_qkv(1, 12, 2, 2, 8, torch.float32), Layout.zigzag(12, 2)
    for long in (1, 100):
        monkeypatch.setattr(areas, "_LONG", long)
        added = two_groups(Mask(12, (Slice((0, 6), (6, 12)),)))
        options = {"scores": added, "bias": bias, "flash": flash}
        _, lse, *grads, dbias = ring_results(layout, tensors, SCALE, **options)
        assert lse.isfinite().sum((0, 2)).tolist() == [0, 6]
        assert all(x.isnan().any(-1).sum((0, 1)).tolist() == [6, 0] for x in grads)
        assert dbias[OTHER].isnan().tolist() == [True, False]


def test_ranks_must_have_one_kernel_for_biases(monkeypatch):
    """They find it by the installed packages, for any `flash`."""
    monkeypatch.setattr(
        extension, "pick", lambda kernel, q, *_: SimpleNamespace(name=f"k{int(q.sum() > 0)}")
    )

    def work(ring):
        q = torch.full((1, 3, 2, 8), float(ring.rank))
        added = Scores.by_distance(Mask.causal(6), integers([0]))
        with pytest.raises(
            ValueError, match="differ in the kernel of the bias: rank 0 has 'k0', rank 1 has 'k1'"
        ):
            burst_attn_func(q, q, q, scores=added, bias=torch.zeros(1, 2), process_group=ring)

    simulate(2, work)


def test_a_digest_tells_scores_apart():
    changes = [
        {},
        {"mask": Mask.full(6)},
        {"group": integers([0, 0, 0, 0, 2, 2])},
        {"group": integers([0, 0, 0, 1, 1, 1]), "segment": integers([0] * 6)},
        {"base": integers([0, 0, 1, 1, 4, 4])},
        {"segment": integers([0, 0, 0, 0, 0, 0])},
        {"pairs": integers([BY_DISTANCE, 5, 6, BY_DISTANCE, BY_DISTANCE, 0])},
        {"pairs": integers([BY_DISTANCE, 5, 6, BY_DISTANCE, 5])},
        {"distances": integers([0, 1, 3])},
        {"distances": integers([1])},
        {"other": 6},
    ]
    assert len({small_scores(**each).digest for each in changes}) == len(changes)
    assert small_scores() == small_scores()
    assert len({small_scores(), small_scores(), small_scores(other=6)}) == 2
