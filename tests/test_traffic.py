"""Messages and bytes on the wire against the closed forms, and the simulator's own guards."""

from contextlib import nullcontext

import pytest
import torch

from bmt_burst import InfLLMV2, Layout, Mask, burst_attn_func, simulate
from bmt_burst.errors import RankFailed
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.strategies import Scoring
from bmt_burst.strategies import ring as ring_strategy
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.payload import (
    KeysValues,
    QueriesDelta,
    QueriesOnly,
    backward_payloads,
    forward_payload,
)
from bmt_burst.transport import LANES, Arrival, Put
from bmt_burst.transport.simulator import SimulatedRing
from tests.cases import call_tensors, random_qkv
from tests.rings import call_messages, problem, ring_arguments
from tests.sparse import RELEASED

B, S, H, G, D = 2, 96, 4, 2, 64  # S tokens of a rank
ITEM = 4


def traffic(size, inner, backward, causal, rank=0, group_bytes=1 << 30, dtype=torch.float32):
    """Return the bytes of each message of `rank`, by ring, of the forward and of the backward."""
    tensors = random_qkv(B, S * size, H, G, D, dtype)
    options = {"causal": causal, "backward": backward, "group_bytes": group_bytes}
    sent = call_messages(Layout.zigzag(S * size, size), tensors, inner, **options)[rank]
    return [[[nbytes for _, nbytes in ring] for ring in half] for half in sent]


K = S * G * D * ITEM  # one batch row of keys, of values or of their gradients: one message
Q = S * H * D * ITEM
ROW = S * H * 4  # lse or delta, fp32


BLOCK = 2 * B * K


def runs(nbytes, share=1):
    """Messages of a zigzag shard, whose two runs land apart, or of one of them."""
    return [nbytes // 2] * (2 // share)


@pytest.mark.parametrize(("tokens", "passes"), [(256, 2), (16384, 4), (32768, 7)])
def test_a_pass_has_heads_enough_for_kernels_or_lets_a_whole_ring_come_at_once(tokens, passes):
    """Blocks twice as large as group_bytes need two passes. Seven let three blocks come at once."""
    sizes = {"heads": 64, "kv_heads": 64, "head_size": 128, "dtype": torch.bfloat16}
    call = problem(
        Mask.full(4 * tokens),
        Layout.zigzag(4 * tokens, 4),
        group_bytes=tokens * 64 * 128 * 2,
        **sizes,
    )
    assert [len(RingPlan(call, rank).forward_program.passes) for rank in range(4)] == [passes] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("group_bytes", "passes"), [(0, G), (BLOCK - 1, 2), (BLOCK, 1), (1 << 30, 1)]
)
def test_forward_sends_keys_and_values_to_every_rank(size, group_bytes, passes):
    """In one pass, or in passes of some heads where a block is more than may come in."""
    [forward], _ = traffic(size, size, "kv", causal=False, group_bytes=group_bytes)
    assert forward == runs(K // passes) * (2 * B * (size - 1) * passes)


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("share", [0.22, 2.5])
def test_what_lands_together_is_bounded(backward, share):
    """Visits by group_bytes, also for longer blocks. Gradients by what their visits were."""
    heads, tokens, group_bytes = 12, 64, int(share * 2 * 16 * 12 * 8 * 4)  # of the kv side's block

    def work(ring):
        q, k, v, _ = (
            x[:, :16].requires_grad_() for x in random_qkv(1, 16, heads, heads, 8, torch.float32)
        )
        burst_attn_func(q, k, v, process_group=ring, backward=backward, group_bytes=group_bytes)
        return ring.reserved

    for reserved in simulate(tokens // 16, work):
        assert 0 < reserved["visit"] <= group_bytes + ring_strategy._ALIGNED
        assert 0 < reserved["return"] <= group_bytes + ring_strategy._ALIGNED


@pytest.mark.parametrize("size", [2, 3, 4])
def test_backward_sends_a_side_there_and_its_gradients_back(size):
    _, [backward] = traffic(size, size, "q", causal=False)
    sent = [half for x in (Q, Q, 2 * ROW, Q) for half in runs(x)]
    assert sorted(backward) == sorted(sent * (B * (size - 1)))
    _, [backward] = traffic(size, size, "kv", causal=False)
    assert backward == runs(K) * (4 * B * (size - 1))


@pytest.mark.parametrize(("rank", "there", "back"), [(0, 2, 1), (3, 1, 2)])
def test_causal_zigzag_sends_only_visible_tokens(rank, there, back):
    """The others attend to half of the first rank's tokens, and to all of the last rank's."""
    [forward], [backward] = traffic(4, 4, "kv", causal=True, rank=rank)
    assert forward == runs(K, there) * (2 * B * 3)
    assert sorted(backward) == sorted([*runs(K, there), *runs(K, back)] * (2 * B * 3))
    _, [backward] = traffic(4, 4, "q", causal=True, rank=rank)
    sent = [*runs(Q, there), *runs(Q, there), *runs(2 * ROW, there), *runs(Q, back)]
    assert sorted(backward) == sorted(sent * (B * 3))


def messages_of_a_chunk(size, inner, keys, **options):
    """Return the bytes of rank 0's messages, by ring. S queries of a rank see all keys."""
    chunk, kv_layout = Layout.zigzag(S * size, size), Layout.zigzag(keys * size, size)
    call = KernelCall.whole(chunk.seq_len, kv_layout.seq_len)
    tensors = call_tensors(call, B, H, G, D, dtype=torch.float32)
    options = {"kv_layout": kv_layout, **options}
    sent = call_messages(chunk, tensors, inner, **options)[0]
    return [[nbytes for _, nbytes in ring] for ring in sent[0]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("group_bytes", "passes"), [(0, G), (1 << 30, 1)])
def test_forward_sends_queries_there_and_outputs_back_where_keys_are_more(
    size, group_bytes, passes, monkeypatch
):
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", 1)
    [forward] = messages_of_a_chunk(size, size, 3 * S, group_bytes=group_bytes)
    assert sum(forward) == B * (size - 1) * (2 * Q + ROW)
    assert {*forward} == {Q // passes, ROW // passes}
    [forward] = messages_of_a_chunk(size, size, 2 * S, group_bytes=group_bytes)
    assert sum(forward) == B * (size - 1) * 4 * K, "keys and values are fewer bytes"


def test_outputs_cross_hosts_once_a_round():
    inner, outer = messages_of_a_chunk(6, 3, 3 * S)
    assert sum(inner) == B * 4 * (2 * Q + ROW)  # two hops in each of two rounds
    assert outer == [B * x for x in (Q, Q, ROW)]  # queries, and their host's share of out and lse


def test_a_forward_alone_reserves_memory_for_what_returns():
    def work(ring):
        q, k, v, _ = call_tensors(KernelCall.whole(S, 3 * S), B, H, G, D)
        burst_attn_func(q, k, v, process_group=ring)
        return ring.reserved

    for reserved in simulate(2, work):
        assert reserved["return"] >= B * S * H * (D + 1) * 8 > reserved["visit"]


@pytest.mark.parametrize(
    ("keys", "changes", "expected"),
    [
        (16 * S, {}, KeysValues),
        (16 * S + S // 8, {}, KeysValues),  # a query with out and lse is 16.125 keys
        (16 * S + S // 8 + 4, {}, QueriesOnly),
        (99 * S, {"kv_layout": None}, KeysValues),
        (99 * S, {"scoring": Scoring()}, KeysValues),
        (99 * S, {"forward": "kv"}, KeysValues),
        (S, {"forward": "q"}, QueriesOnly),
    ],
)
def test_the_side_of_a_forward_follows_from_the_problem(keys, changes, expected):
    sizes = {"heads": 32, "kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
    layout, kv_layout = (Layout.contiguous(4 * tokens, 4) for tokens in (S, keys))
    mask = Mask.full(4 * S, 4 * keys)
    call = problem(mask, layout, **sizes, **{"kv_layout": kv_layout, **changes})
    assert type(forward_payload(call)) is expected


@pytest.mark.parametrize(
    ("kv_heads", "cu_seqlens", "expected"),
    [
        (4, (0, 96), QueriesDelta),  # 3 H D, lse and delta, against 4 H D
        (2, (0, 96), KeysValues),
        (4, (0, 40, *range(44, 97, 4)), KeysValues),  # far more queries see one rank's keys
    ],
)
def test_the_side_of_a_backward_follows_from_bytes_and_work(kv_heads, cu_seqlens, expected):
    mask = Mask.documents(cu_seqlens)
    call = problem(mask, Layout.balanced(mask, 2), heads=4, kv_heads=kv_heads, head_size=32)
    assert type(RingPlan(call, 0).backward_program.payload) is expected


def test_the_near_part_of_sparse_attention_sends_the_few_keys_that_queries_see():
    sparse = InfLLMV2(**RELEASED | {"window_size": 512, "topk": 4, "dense_len": 0})
    layout, kv_layout = (Layout.contiguous(tokens, 4) for tokens in (64, 1 << 14))
    mask = Mask.causal(64, 1 << 14)
    call = problem(mask, layout, heads=32, kv_heads=2, head_size=128, kv_layout=kv_layout)
    near = sparse.plan(call, 0, "ring").near
    assert isinstance(near, RingPlan)
    assert isinstance(forward_payload(call), QueriesOnly)
    assert [type(x) for x in backward_payloads(call)] == [QueriesDelta]
    for program in (near.forward_program, near.backward_program):
        assert isinstance(program.payload, KeysValues)


def test_double_ring_crosses_hosts_once_a_round():
    (inner, outer), (inner_back, outer_back) = traffic(6, 3, "kv", causal=False)
    assert inner == runs(K) * (2 * B * 4)  # two hops in each of two rounds
    assert outer == [K * B] * 2
    assert inner_back == runs(K) * (4 * B * 4)
    assert outer_back == [K * B] * 4  # the block, and its host's share of the gradient


@pytest.mark.parametrize(("rank", "there", "back"), [(0, 2, 1), (3, 1, 2)])
def test_later_hosts_get_the_tokens_that_they_attend_to(rank, there, back):
    """Half of the first host's tokens cross, with half of their gradients; the other way all."""
    (_, outer), (_, outer_back) = traffic(4, 2, "kv", causal=True, rank=rank)
    assert outer == [K * B // there] * 2
    assert outer_back == [K * B // there] * 2 + [K * B // back] * 2


def test_sums_cross_hosts_in_the_dtype_of_what_they_add_up():
    (_, outer), (_, outer_back) = traffic(4, 2, "kv", causal=False, dtype=torch.bfloat16)
    assert outer == [K * B // 2] * 2
    assert outer_back == [K * B // 2] * 4


def test_a_send_buffer_must_stay_as_it_is():
    def work(ring):
        send, recv = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        ticket = ring.exchange([(send, 1 - ring.rank)], [(recv, 1 - ring.rank)])
        assert (recv == 255).all(), "a receive buffer is poisoned until the exchange is over"
        send += 1
        ticket.wait()

    with pytest.raises((AssertionError, RankFailed), match=r"overwritten|another simulated rank"):
        simulate(2, work)


@pytest.mark.parametrize("waits", [False, True])
def test_a_put_must_stay_as_it_is_until_its_release_or_a_wait_for_it(waits):
    """Copy engines may read it after `wait`, which waits only for what is received."""

    def work(ring):
        peer, block = 1 - ring.rank, torch.zeros(4, dtype=torch.uint8)
        ring.reserve(dict.fromkeys(LANES, 4), block.device)
        puts, arrivals = [Put(block, peer, 0)], [Arrival(peer, 0, 4)]
        delivery = ring.deliver("visit", 4, puts, arrivals, block.device)
        delivery.wait()
        if waits:
            delivery.wait_for_sends()
        block += 1
        delivery.release()

    refused = pytest.raises(
        (AssertionError, RankFailed), match=r"overwritten|another simulated rank"
    )
    with nullcontext() if waits else refused:
        simulate(2, work)


def test_all_ranks_connect_both_rings_once_a_plan_also_those_without_a_part(monkeypatch):
    """NCCL waits for all ranks of a group in its first operation, also those without a part."""
    connected = []
    monkeypatch.setattr(
        SimulatedRing, "connect", lambda ring, device: connected.append((ring.members, ring.rank))
    )
    layout, mask = Layout.contiguous(16, 4), Mask.documents((0, 8, 12, 16))

    def work(ring):
        q, k, v, _ = (layout.shard(x, ring.rank) for x in random_qkv(1, 16, 2, 2, 8))
        groups = ring_arguments(ring, 2)
        for _ in range(2):
            burst_attn_func(q, k, v, mask=mask, layout=layout, **groups)

    simulate(4, work)
    assert sorted(connected) == [
        ((r, s), i) for r, s in ((0, 1), (0, 2), (1, 3), (2, 3)) for i in (0, 1)
    ]
