"""Threads: one at a time in a group, which others find out at once; or a group for each."""

import contextlib
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from bmt_burst import (
    Mask,
    SequenceParallel,
    burst_attn_func,
    init_sequence_parallel,
    shard,
    simulate,
)
from bmt_burst.ranks.agreement import admit_one_thread
from bmt_burst.ranks.rings import Rings, make_rings
from bmt_burst.transport import ALONE
from bmt_burst.transport.messenger import Messenger
from bmt_burst.transport.torch_dist import TorchTransport, torch_transport
from tests.cases import random_qkv
from tests.launcher import run_in_turn, run_threads
from tests.reference import dense_results
from tests.rings import Mute

RULE = (
    "group is for one thread at a time: let threads take turns, or give each thread its own group"
)
LIMIT = 200.0  # seconds; of what must happen


def attend(ring, tensors, **options):
    return burst_attn_func(
        *(shard(x, ring.rank, ring.size) for x in tensors[:3]), 0.3, process_group=ring, **options
    )


def inside(ring, entered, left, monkeypatch):
    """Hold this rank within what it does next: it sets `entered`, and goes on after `left`."""
    gather = ring.messenger.gather

    def slow(message):
        entered.set()
        assert left.wait(LIMIT)
        return gather(message)

    monkeypatch.setattr(ring.messenger, "gather", slow)


USES = {
    "a call": lambda ring, tensors: attend(ring, tensors),
    "unshard": lambda ring, tensors: SequenceParallel(
        ring.rank, ring.size, process_group=ring
    ).unshard(shard(tensors[0], ring.rank, ring.size), tensors[0].shape[1]),
    "sum": lambda ring, tensors: SequenceParallel(ring.rank, ring.size, process_group=ring).sum(
        tensors[0]
    ),
}


@pytest.mark.parametrize("first", ["forward", "backward"])
@pytest.mark.parametrize("use", USES)
def test_a_second_thread_in_a_group_raises_at_once_and_the_first_in_the_end(
    use, first, monkeypatch
):
    tensors = random_qkv(1, 12, 2, 2, 8)
    seen = []

    def work(ring):
        leaves = [shard(x, ring.rank, 2).requires_grad_() for x in tensors[:3]]
        out = burst_attn_func(*leaves, 0.3, process_group=ring) if first == "backward" else None
        if ring.rank == 0:
            entered, left = threading.Event(), threading.Event()
            inside(ring, entered, left, monkeypatch)

            def second():
                assert entered.wait(LIMIT)
                try:
                    with pytest.raises(RuntimeError, match=RULE):
                        USES[use](ring, tensors)
                    seen.append(True)
                finally:
                    left.set()

            threading.Thread(target=second).start()
        return attend(ring, tensors) if out is None else torch.autograd.grad(out.sum(), leaves)

    with pytest.raises(RuntimeError, match=RULE):
        simulate(2, work)
    assert seen == [True]


def test_threads_may_take_turns():
    """Also a forward in one and its backward in another, as autograd's threads have it."""
    tensors = random_qkv(1, 12, 2, 2, 8)

    def work(ring):
        leaves = [shard(x, ring.rank, 2).requires_grad_() for x in tensors[:3]]
        [out] = run_threads(lambda: burst_attn_func(*leaves, 0.3, process_group=ring))
        [grads] = run_threads(lambda: torch.autograd.grad(out.sum(), leaves))
        again = burst_attn_func(*leaves, 0.3, process_group=ring)
        return all(
            x.equal(y) for x, y in zip(grads, torch.autograd.grad(again.sum(), leaves), strict=True)
        )

    assert simulate(2, work) == [True, True]


def threads_of_two_groups(rank: int) -> list[float]:
    """The largest error of each of two threads, each with a group of both ranks."""

    def work(number, group):
        worst = 0.0
        for seed in range(10 * number, 10 * number + 10):
            tensors = random_qkv(1, 16, 2, 2, 8, seed=seed)
            mine = [shard(x, rank, 2).requires_grad_() for x in tensors[:3]]
            out = burst_attn_func(*mine, 0.3, process_group=group)
            out.sum().backward()
            expected = shard(dense_results(Mask.full(16), tensors[:3], 0.3)[0], rank, 2)
            worst = max(worst, float((out - expected).abs().max()))
        return worst

    works = [partial(work, number, dist.new_group([0, 1])) for number in range(2)]
    return run_threads(*works)


def test_threads_without_a_group_may_make_plans_at_once(monkeypatch):
    """Each drops the oldest plan, which another one may just have dropped."""

    class Shared(dict):
        def pop(self, *arguments):
            super().pop(arguments[0], None)  # as another thread does in between
            return super().pop(*arguments)

    history = make_rings(None, (None, None)).history
    monkeypatch.setattr(history, "most", 2)
    monkeypatch.setattr(history, "plans", Shared())
    for tokens in range(3, 8):
        x = torch.ones(1, tokens, 1, 8)
        assert burst_attn_func(x, x, x).allclose(x)
    assert len(history.plans) == 2


class Silent(Messenger):
    """A messenger that keeps the reasons for which it was closed."""

    def __init__(self):
        self.reasons = []

    def _gather(self, message):
        raise AssertionError("nothing is sent here")

    def close(self, reason):
        self.reasons.append(reason)


def test_a_group_is_left_also_where_its_first_thread_fails():
    """As where ranks differ, because other threads were first. Ranks that wait must raise."""
    ring = Mute(Silent())
    rings = Rings(ring, ALONE)

    def refused():
        with pytest.raises(RuntimeError, match=RULE), admit_one_thread(rings, "a second call"):
            pass

    with pytest.raises(ValueError, match="ranks differ"), admit_one_thread(rings, "a call"):
        run_threads(refused)
        assert ring.messenger.reasons == []  # the first one may be in the middle of a message
        raise ValueError("ranks differ")
    [reason] = ring.messenger.reasons
    assert RULE in reason
    with pytest.raises(RuntimeError, match=RULE), admit_one_thread(rings, "a third call"):
        pass


def test_threads_that_find_a_group_at_once_have_one_transport(one_process, monkeypatch):
    """Else neither would know that the other one is in a call."""
    both = threading.Barrier(2)
    make = TorchTransport.__init__

    def slow(transport, *arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # which the second one does not come to
        make(transport, *arguments)

    monkeypatch.setattr(TorchTransport, "__init__", slow)
    first, second = run_threads(*[lambda: torch_transport(dist.group.WORLD)] * 2)
    assert first is second


def init_beside_a_call(rank: int) -> str:
    """The error of a thread that makes groups while another one is in a call over all ranks."""
    errors = []

    def make_groups():
        with pytest.raises(RuntimeError, match=RULE) as caught:
            init_sequence_parallel(2)
        errors.append(str(caught.value))

    rings = make_rings(None, (None, None))
    with pytest.raises(RuntimeError, match=RULE), admit_one_thread(rings, "a call"):
        run_threads(make_groups)
    return errors[0]


def test_threads_with_a_group_each_go_on_and_one_makes_groups_only_alone():
    worst_errors, refusals = run_in_turn(2, threads_of_two_groups, init_beside_a_call)
    assert max(map(max, worst_errors)) < 1e-13
    for error in refusals:
        assert error.startswith("init_sequence_parallel: two threads of this process")
