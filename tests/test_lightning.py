"""Lightning attention: equal to a recurrence token by token, on any ranks, with states alone."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bmt_burst import Layout, Mask, alibi_slopes, lightning_attn_func, simulate
from bmt_burst.base import kept
from bmt_burst.lightning import reference
from bmt_burst.lightning.rates import find_rates
from bmt_burst.lightning.segments import Segments, plan_states
from bmt_burst.sparse import Choices, keep_choices
from tests.lightning import (
    Cut,
    expected_results,
    over_ranks,
    random_log_decay,
    random_tensors,
    recurrence,
    worst_error,
)
from tests.refusals import TRANSFORMS, refusal, refusal_of_rank, transform

EXACT = 1e-12  # fp64 rounds at 1e-16; sums have some hundred terms
SCALE = 0.31
RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (4, 1), (6, 3), (8, 4)]  # and of a host


def random_documents(chance: random.Random, tokens: int) -> Mask:
    """Return causal documents: one, some, many short ones, or each of one token."""
    count = min(chance.choice((0, 0, chance.randint(1, 4), tokens // 2, tokens)), tokens - 1)
    return Mask.documents((0, *sorted(chance.sample(range(1, tokens), count)), tokens))


def random_layout(chance: random.Random, mask: Mask, size: int) -> Layout:
    """Return a layout whose runs are short or long, some with equally many tokens as zigzag."""
    tokens = mask.seq_len
    kind = chance.choice(("zigzag", "contiguous", "balanced", "chunks", "runs"))
    if kind == "balanced":
        return Layout.balanced(mask, size)
    if kind == "chunks":
        return Layout.chunks(tokens, size, 2 * size, "contiguous")
    if kind == "runs":
        owners = [rank for rank in range(size) for _ in Layout.zigzag(tokens, size).positions(rank)]
        chance.shuffle(owners)
        return Cut(owners)
    return Layout.named(kind, tokens, size)


def random_case(seed: int) -> tuple[int, list[Mask], list[Layout]]:
    """Return the number of ranks of a host, and masks and layouts of one or two rows."""
    chance = random.Random(seed)
    size, inner = RINGS[seed % len(RINGS)]
    tokens = chance.choice((max(size, 2), size + 1, chance.randint(size + 1, 70)))
    masks = [random_documents(chance, tokens)]
    layouts = [random_layout(chance, masks[0], size)]
    if chance.random() < 0.7:
        masks.append(chance.choice((masks[0], random_documents(chance, tokens))))
        layouts.append(chance.choice((layouts[0], random_layout(chance, masks[1], size))))
    if len({tuple(x.length(rank) for rank in range(x.size)) for x in layouts}) > 1:
        del masks[1:], layouts[1:]  # rows must give a rank the same number of tokens
    return inner, masks, layouts


CASES = range(3 * len(RINGS))


tokens_choose_or_not = pytest.mark.parametrize(
    "tokens_choose", [False, True], ids=["slopes", "log_decay"]
)


@tokens_choose_or_not
def test_equals_the_recurrence(tokens_choose, monkeypatch):
    """On 1 to 8 ranks and hosts, with documents, layouts, rows and chunks of any kind."""
    rows = set()
    for seed in CASES:
        inner, masks, layouts = random_case(seed)
        monkeypatch.setattr(reference, "CHUNK", (1, 5, 64)[seed % 3])
        tensors, rates = random_tensors(len(masks), masks[0].seq_len)
        if tokens_choose:
            rates = random_log_decay(len(masks), masks[0].seq_len)
        expected = expected_results(tensors, rates, SCALE, masks)
        got, _ = over_ranks(layouts, tensors, rates, inner, scale=SCALE, mask=masks)
        assert len(got) == 4 + tokens_choose
        if tokens_choose and not expected[4].any():  # of documents of one token
            assert not got.pop().any()
            expected.pop()
        assert worst_error(got, expected) < EXACT, (seed, inner, masks, layouts)
        rows.add((len(masks), len(set(masks)), len(set(layouts))))
    assert len(rows) == 5, "a batch of 1 or 2, and all ways in which 2 rows may differ"


def test_a_thousand_short_documents_have_no_states():
    """Only a chunk within a document takes a state, and only an open segment leaves one."""
    segments = Segments((*range(1_000), 1_200))
    k = torch.randn(1_200, 4, 4)
    states = reference.forward_states(k, k, find_rates(segments, (0.0,) * 4, None, k), segments)
    assert states.last.shape == (0, 4, 4, 4)
    assert sum(x is not None for x in states.chunks) == (1_200 - 999 - 1) // reference.CHUNK


@tokens_choose_or_not
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(size, dtype, tokens_choose):
    """States are fp32. The sums of 16-bit inputs are too, so only results are rounded."""
    masks = [Mask.documents((0, 90, 91, 300))] * 2
    tensors, rates = random_tensors(2, 300, 8)
    if tokens_choose:
        rates = random_log_decay(2, 300).float()
    rounded = [x.to(dtype) for x in tensors]
    wide = rates.double() if tokens_choose else rates
    expected = expected_results([x.double() for x in rounded], wide, SCALE, masks)
    layouts = [Layout.zigzag(300, size)] * 2
    got, _ = over_ranks(layouts, rounded, rates, scale=SCALE, mask=masks)
    assert {x.dtype for x in got[:4]} == {dtype} and {x.dtype for x in got[4:]} <= {torch.float32}
    most = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert worst_error([x.double() for x in got], expected) < most


def test_autocast_casts_inputs_and_leaves_slopes():
    tensors, slopes = random_tensors(1, 9)
    q, k, v = (x.float() for x in tensors[:3])
    with torch.autocast("cpu", torch.bfloat16):
        out = lightning_attn_func(q, k.bfloat16(), v, slopes)
    assert out.equal(lightning_attn_func(*(x.bfloat16() for x in (q, k, v)), slopes))


def test_inputs_may_be_views_of_packed_ones():
    (q, *_), slopes = random_tensors(2, 40)
    packed = torch.randn(2, 40, 3, *q.shape[2:], dtype=torch.float64, requires_grad=True)
    q, k, v = packed.unbind(2)
    transposed = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    outs = [lightning_attn_func(*x, slopes, scale=SCALE) for x in ((q, k, v), transposed)]
    expected = recurrence(q, k, v, slopes, SCALE, [{0}, {0}])
    for out in outs:
        assert worst_error([out], [expected]) < EXACT
        [got] = torch.autograd.grad(out.sum(), packed, retain_graph=True)  # dout is expanded
        [dpacked] = torch.autograd.grad(expected.sum(), packed, retain_graph=True)
        assert worst_error([got], [dpacked]) < EXACT


@pytest.mark.parametrize("size", [1, 2])
def test_calls_share_nothing_and_a_backward_may_run_again(size):
    """With retain_graph, and after the forward and backward of another call."""
    layout, (tensors, _) = Layout.zigzag(40, size), random_tensors(1, 40)
    whole = [*tensors, random_log_decay(1, 40), random_log_decay(1, 40)]

    def work(ring):
        *qkv, dout, own, other = (layout.shard(x, ring.rank).requires_grad_() for x in whole)
        one, two = (
            lightning_attn_func(*qkv, log_decay=x, process_group=ring) for x in (own, other)
        )
        leaves = [*qkv, own]
        first = torch.autograd.grad(one, leaves, dout, retain_graph=True)
        two.sum().backward()
        again = torch.autograd.grad(one, leaves, dout)
        assert all(x.equal(y) for x, y in zip(first, again, strict=True))

    simulate(size, work)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("slope", [0.0, 1 / 256, 20.0, 1e30, 3e38])
def test_no_slope_overflows(size, slope):
    """Decays are never divided by each other: a run of 1,000 tokens would overflow."""
    tokens = 1_000
    tensors, _ = random_tensors(1, tokens, 2, 1)
    tensors, slopes = [x.float() for x in tensors], torch.tensor([slope])
    got, _ = over_ranks([Layout.zigzag(tokens, size)], tensors, slopes, scale=1.0)
    assert all(x.isfinite().all() for x in got)
    if slope >= 1e30:  # only the own token is left
        q, k, v, _ = tensors
        own = (q * k).sum(-1, keepdim=True) * v
        assert worst_error([got[0]], [own]) < 1e-5


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strong", [-1e5, -3e38, -torch.inf])
def test_a_strong_decay_rounds_no_later_one(size, strong):
    """In fp32, 1e5 - 1e-3 is 1e5. So a difference of two running sums would have no weak decays."""
    tensors, log_decay = random_tensors(1, 300)[0], torch.full((1, 300, 4), -1e-3)
    log_decay[:, [50, 140, 141], ::2] = strong
    expected = expected_results(tensors, log_decay.double(), 1.0, [Mask.causal(300)])
    tensors = [x.float() for x in tensors]
    got, _ = over_ranks([Layout.zigzag(300, size)], tensors, log_decay, scale=1.0)
    assert worst_error([x.double() for x in got], expected) < 1e-5


def test_a_plan_prints():
    plan = plan_states(Layout.zigzag(40, 2), (0, 4, 40), 1)
    assert str(plan) == (
        "rank 1: positions 10 to 29, 1 segments, 1 open, 1 leave a state\n"
        "  forward adds 1 states, sends 1 within the host and 0 between hosts\n"
        "  backward adds 1 states, sends 1 within the host and 0 between hosts"
    )


# what travels


def sent_bytes(layout, inner=None, **options) -> list[list[int]]:
    """Return the bytes that each rank sends over each ring, in a forward and a backward."""
    tensors, slopes = random_tensors(1, layout.seq_len)
    tensors = [x.float() for x in tensors]
    _, sent = over_ranks([layout], tensors, slopes, inner, **options)
    return [[sum(nbytes for _, nbytes in ring) for ring in rings] for rings in sent]


STATE = 4 * 4 * 4 * 4  # bytes: 4 heads of 4 x 4, fp32


def test_a_rank_that_takes_no_state_saves_none():
    """A view of nothing would hold the memory of its own states until the backward."""
    x = torch.randn(1, 8, 1, 4, requires_grad=True)

    def work(ring):
        out = lightning_attn_func(x, x, x, torch.zeros(1), layout="contiguous", process_group=ring)
        return out.grad_fn.next_functions[0][0].saved_tensors[3].untyped_storage().nbytes()

    assert simulate(2, work) == [0, 4 * 4 * 4]


def test_only_states_travel():
    """Contiguous: a rank sends its state to all later ranks, its gradient to all earlier ones."""
    for tokens in (64, 640):  # the length plays no part
        sent = sent_bytes(Layout.contiguous(tokens, 4))
        assert sent == [[3 * STATE], [3 * STATE], [3 * STATE], [3 * STATE]]
    # Zigzag: 8 chunks, of which 3 and 4 are one run. In the forward rank 0 sends run 0 to 1, 2, 3.
    # Rank 3's only run needs runs 0 to 2, and all others are needed up to rank 0's last one.
    assert sent_bytes(Layout.zigzag(64, 4))[0] == [6 * STATE]
    most = [2 * 2 * 3 * STATE]  # an all-gather of two runs in both directions
    assert all(x <= most for x in sent_bytes(Layout.zigzag(64, 4)))


def test_a_state_travels_with_the_sum_of_log_decay():
    """One more number a head."""
    layout, q = Layout.contiguous(64, 4), torch.randn(1, 64, 4, 4)
    _, sent = over_ranks([layout], [q] * 4, -torch.rand(1, 64, 4))
    assert [[sum(nbytes for _, nbytes in ring) for ring in rings] for rings in sent] == [
        [3 * (STATE + 4 * 4)]
    ] * 4


def test_between_hosts_a_state_travels_once():
    """The intra ring is the first."""
    sent = sent_bytes(Layout.contiguous(64, 4), inner=2)
    # Rank 0 sends its state to rank 1, and to rank 2, which passes it on to rank 3. In the backward
    # rank 0 passes the gradient of rank 2 on to rank 1.
    assert sent == [[2 * STATE, STATE]] * 4


@pytest.mark.parametrize("inner", [4, 2])
def test_documents_that_end_inside_their_run_send_nothing(inner):
    layout, mask = Layout.contiguous(64, 4), Mask.documents((0, 3, 16, 32, 40, 48, 64))
    assert all(not any(x) for x in sent_bytes(layout, inner, mask=mask))
    # one document in the runs of ranks 1 and 2 only
    mask = Mask.documents((0, 16, 20, 40, 64))
    zero = [0] * (2 if inner == 2 else 1)
    expected = [zero, [STATE], [STATE], zero]
    if inner == 2:  # rank 1 is at place 1 of host 0, rank 2 at place 0 of host 1
        expected = [[STATE, 0], [0, STATE], [0, STATE], [STATE, 0]]
    mask = Mask.documents((0, 16, 20, 40, 48, 64))
    assert sent_bytes(layout, inner, mask=mask) == expected


# activation checkpointing


@tokens_choose_or_not
@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "context_fn": keep_choices},
    ],
)
def test_a_recomputation_takes_the_kept_states(options, tokens_choose):
    """It sends what one forward and one backward send."""
    tensors, slopes = random_tensors(1, 40)
    if tokens_choose:
        tensors, slopes = (*tensors[:3], random_log_decay(1, 40), tensors[3]), None
    layout = Layout.zigzag(40, 2)

    def work(ring, is_checkpointed):
        choices = contextlib.nullcontext() if "context_fn" in options else Choices()

        def attend(q, k, v, log_decay=None):
            options = {"log_decay": log_decay, "process_group": ring}
            with choices.of("layer") if isinstance(choices, Choices) else choices:
                return q + lightning_attn_func(q, k, v, slopes, **options)

        *leaves, dout = (layout.shard(x, ring.rank) for x in tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out = checkpoint(attend, *leaves, **options) if is_checkpointed else attend(*leaves)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves)], ring.traffic

    plain = simulate(2, lambda ring: work(ring, is_checkpointed=False))
    again = simulate(2, lambda ring: work(ring, is_checkpointed=True))
    for (found, sent), (expected, traffic) in zip(again, plain, strict=True):
        assert sent == traffic
        assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


def test_a_recomputation_that_exchanges_again_warns_and_is_exact(caplog):
    tensors, slopes = random_tensors(1, 40)
    layout = Layout.zigzag(40, 2)
    kept._warn_of_finding_again.cache_clear()

    def work(ring):
        *leaves, dout = (layout.shard(x, ring.rank) for x in tensors)
        leaves = [x.requires_grad_() for x in leaves]

        def attend(*qkv):
            return lightning_attn_func(*qkv, slopes, scale=SCALE, process_group=ring)

        out = checkpoint(attend, *leaves, use_reentrant=False)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves)]

    results = [layout.unshard(parts) for parts in zip(*simulate(2, work), strict=True)]
    expected = expected_results(tensors, slopes, SCALE, [Mask.causal(40)])
    assert worst_error(results, expected) < EXACT
    assert "lightning attention exchanges its states again in a recomp" in caplog.text


# slopes and refusals


def test_alibi_slopes():
    """Those of the released model, and of 12 heads as the paper's code has them."""
    released = alibi_slopes(32)
    assert released.dtype == torch.float32
    expected = torch.tensor([2 ** (-(h + 1) / 4) for h in range(32)])
    assert released.equal(expected) and released[-1] == 1 / 256
    eight = [2.0**-i for i in range(1, 9)]
    four = [2 ** (-0.5 - i) for i in range(4)]
    assert alibi_slopes(12).equal(torch.tensor(eight + four))
    assert alibi_slopes(1).equal(torch.tensor([2.0**-8]))
    for wrong, text in ((0, "ValueError: at least 1"), (2.0, "TypeError: a whole number")):
        with refusal(text):
            alibi_slopes(wrong)


X = torch.zeros(1, 4, 4, 4)
LOG_DECAY = {"slopes": None, "log_decay": X[..., 0]}
WRONG = [
    ({"mask": Mask.causal(8, 9)}, "ValueError: the mask|of one sequence"),
    ({"mask": [Mask.causal(8)] * 2}, "ValueError: 2 entries for a batch of 1"),
    ({"mask": Mask.causal(9)}, "ValueError: the mask has 9 tokens, the ranks hold 8"),
    ({"layout": [Layout.striped(8, 2)]}, "ValueError: needs runs of consecutive tokens"),
    ({"layout": Layout.chunks(8, 2, 4, "striped")}, "ValueError: needs runs of consecutive tokens"),
    ({"layout": Layout.zigzag(8, 3)}, "ValueError: a layout on 2 ranks, got one on 3"),
    ({"layout": "wild"}, "ValueError: unknown layout 'wild'"),
    ({"layout": 3}, "TypeError: layout must be"),
    ({"k": X[:, :, :2], "v": X[:, :, :2]}, "ValueError: as many heads as q, 4, got 2: repeat"),
    ({"v": X[..., :2]}, "ValueError: v must have q's head size, 4, got 2"),
    ({"k": X[:, :3], "v": X[:, :3]}, "ValueError: 4 queries and 3 keys"),
    ({"k": X.double()}, "TypeError: one dtype"),
    ({"slopes": torch.tensor([0.1, 0.2, -0.1, 1.0])}, "ValueError: at least 0, got -0.1.*head 2"),
    ({"slopes": torch.tensor([0, 0, 0, float("inf")])}, "ValueError: finite.*inf for head 3"),
    ({"slopes": torch.tensor([float("nan")] * 4)}, "ValueError: finite.*nan for head 0"),
    ({"slopes": torch.zeros(3)}, r"ValueError: slopes must be \(4,\), .* got shape \(3,\)"),
    ({"slopes": torch.zeros(4, 1)}, "ValueError: one for each head"),
    ({"slopes": torch.zeros(4).double()}, "TypeError: torch.float32, got torch.float64"),
    ({"slopes": torch.zeros(4, device="meta")}, "ValueError: on cpu or the CPU, got meta"),
    ({"slopes": torch.zeros(4, requires_grad=True)}, "ValueError: requires_grad=False"),
    ({"slopes": [0.0] * 4}, "TypeError: slopes must be a torch.Tensor, got list"),
    (LOG_DECAY | {"log_decay": X[..., 0] + 2}, "ValueError: log_decay must be at most 0, got 2.0"),
    (LOG_DECAY | {"log_decay": X}, r"ValueError: log_decay must be \(1, 4, 4\), .* token and head"),
    (LOG_DECAY | {"log_decay": -X[..., 0].double()}, "TypeError: torch.float32, got torch.float64"),
    (LOG_DECAY | {"log_decay": -X[..., 0].to("meta")}, "ValueError: log_decay must be on cpu, got"),
    (LOG_DECAY | {"log_decay": 0.5}, "TypeError: log_decay must be a torch.Tensor, got float"),
    (LOG_DECAY | {"flash": "triton"}, "ValueError: triton: it computes slopes, and no log_decay"),
    ({"scale": 0.0}, "ValueError: scale must be positive"),
    ({"flash": "fa4"}, "ValueError: one of .'auto', 'triton', 'reference'., got 'fa4'"),
    ({"flash": None}, "TypeError: flash must be the name"),
    ({"scores": X}, "TypeError: no softmax"),
    ({"deterministic": True}, "TypeError: bitwise equal: leave it out"),
    ({"causal": True}, "TypeError: causal without a mask"),
    ({"cache": X}, "TypeError: .*LightningAttention takes a cache"),
    ({"initial_state": X}, "TypeError: 0 before each document.*continues states in .*Chunks"),
    ({"output_final_state": True}, "TypeError: continues states in bmt_burst.Chunks"),
    ({"g_gamma": X}, "TypeError: write slopes=-g_gamma"),
    ({"g": X}, "TypeError: write log_decay=g"),
    ({"gk": X}, "TypeError: one decay a token: write log_decay"),
    ({"softmax_scale": 1.0}, "TypeError: write scale"),
]


def call(ring, **changed):
    return lightning_attn_func(
        **{"q": X, "k": X, "v": X, "slopes": alibi_slopes(4), "process_group": ring, **changed}
    )


@pytest.mark.parametrize(("changed", "text"), WRONG)
def test_what_is_wrong_on_one_rank_is_refused_on_all(changed, text):
    """Then the ranks can go on."""

    def work(ring):
        everywhere = "mask has" in text or "consecutive" in text  # found once ranks have agreed
        mine = changed if ring.rank or everywhere else {}
        expected = refusal(text) if everywhere else refusal_of_rank(1, ring.rank, text)
        with expected:
            call(ring, **mine)
        return call(ring)

    assert all(out.equal(X) for out in simulate(2, work))


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        ({"q": X.double(), "k": X.double(), "v": X.double()}, "differ in dtype"),
        ({"q": X.clone().requires_grad_()}, "differ in recording of gradients"),
    ],
)
def test_what_differs_between_ranks_is_refused(mine, text):
    def work(ring):
        with pytest.raises(ValueError, match=text):
            call(ring, **(mine if ring.rank else {}))
        return call(ring)

    assert all(out.equal(X) for out in simulate(2, work))


def test_ranks_must_all_keep_their_states_or_none():
    def work(ring):
        first, second = keep_choices()
        with second if ring.rank else first, refusal("ValueError: ranks differ in kept states"):
            call(ring)

    simulate(2, work)


def test_fewer_tokens_than_ranks_are_refused():
    def work(ring):
        x = X[:, : int(ring.rank < 2)]
        with refusal("ValueError: a sequence of 2 tokens is too short for 3 ranks"):
            call(ring, q=x, k=x, v=x)

    simulate(3, work)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_are_refused(kind):
    with refusal(f"RuntimeError: {TRANSFORMS[kind].format('lightning_attn_func')}"):
        transform(kind, lambda x: lightning_attn_func(x, X, X, alibi_slopes(4)), X.clone())


def test_second_derivatives_are_refused():
    x = X.clone().requires_grad_()
    out = lightning_attn_func(x, X, X, alibi_slopes(4))
    with refusal("RuntimeError: lightning_attn_func is differentiable once"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_ranks_without_tokens_pass_states_on():
    """In a double ring, rank 1 receives the state of rank 3 for rank 0."""
    owners = [3] * 5 + [0] * 4 + [3] * 3 + [2] * 2
    layout = Cut(owners)
    tensors, slopes = random_tensors(1, len(owners))
    expected = expected_results(tensors, slopes, SCALE, [Mask.causal(len(owners))])
    got, _ = over_ranks([layout], tensors, slopes, 2, scale=SCALE)
    assert worst_error(got, expected) < EXACT
