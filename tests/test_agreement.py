"""Ranks that fall out of step: every rank raises at once, and no result is silently wrong."""

import functools
import itertools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from bmt_burst import InfLLMV2, SequenceParallel, burst_attn_func, kernels, nn, simulate
from bmt_burst.errors import RankFailed
from bmt_burst.ranks.agreement import gather_terms
from bmt_burst.ranks.rings import Rings, make_rings
from bmt_burst.strategies.ring import Ring, RingPlan
from bmt_burst.transport import Transport, sockets
from tests.cases import random_qkv
from tests.launcher import run_in_turn


def call(group, tokens: int = 6, **options):
    """The output of a call whose gradients are asked for, and its inputs."""
    inputs = [x.requires_grad_() for x in random_qkv(1, tokens, 2, 2, 8)[:3]]
    return burst_attn_func(*inputs, causal=True, process_group=group, **options), inputs


def differentiate(out, inputs):
    return torch.autograd.grad(out.square().sum(), inputs)


def error_of(attempt) -> str:
    """Return the error of an attempt, which must fail soon."""
    began = time.monotonic()
    with pytest.raises(
        (ValueError, TypeError, RuntimeError, MemoryError, KeyError, TimeoutError)
    ) as caught:
        attempt()
    assert time.monotonic() - began < 100  # not after the timeout
    return f"{type(caught.value).__name__}: {caught.value}"


def other_orders(rank: int, group) -> None:
    """Backwards in another order, one skipped, one that fails early. The group stays in order."""
    begins = "RanksDisagree: ranks do not do the same: rank 0 begins "
    calls = [call(group), call(group)]
    error = error_of(lambda: differentiate(*calls[rank]))
    assert error == f"{begins}the backward of call 1, rank 1 begins the backward of call 2"
    out, inputs = call(group)
    error = error_of(lambda: differentiate(out, inputs) if rank else call(group))
    assert error == f"{begins}a call of burst_attn_func, rank 1 begins the backward of call 3"
    out, inputs = call(group)
    if rank:
        inputs[0].detach().mul_(2)
    error = error_of(lambda: differentiate(out, inputs))
    assert "modified by an inplace operation" in error
    assert error.startswith("RuntimeError" if rank else "RanksDisagree: rank 1 of the group")
    differentiate(*call(group))


def failing(kernel, method: str, rank: int, who: tuple[int, ...]):
    """Lets the kernel's second call from now on fail on ranks `who`; returns what undoes that."""
    plain, left = getattr(kernel, method), [2]

    def fail(*args, **options):
        left[0] -= 1
        if left[0] == 0 and rank in who:
            raise MemoryError("no memory left")
        return plain(*args, **options)

    setattr(kernel, method, fail)
    return lambda: setattr(kernel, method, plain)


def broken_off(rank: int, group, method: str, who: tuple[int, ...]) -> None:
    """A kernel fails in the middle of a forward or backward on some ranks; then a call."""
    out, inputs = call(group) if method == "backward" else (None, None)
    undo = failing(kernels.load("cpu"), method, rank, who)
    sockets._FAILING = patience(who)
    # all that this rank needs of the other has left it by then
    if method == "forward" and rank not in who:
        call(group)
    else:
        error = error_of(lambda: differentiate(out, inputs) if out is not None else call(group))
        assert rank not in who or error == "MemoryError: no memory left"
    undo()
    if who == (0, 1):
        assert call(group)[0].shape == (1, 6, 2, 8)
        return
    then = error_of(lambda: call(group))
    assert "no memory left" in then
    assert then.startswith("RankFailed: rank 1") or "its group is unusable" in then


def patience(who: tuple[int, ...]) -> float:
    """Return how many seconds the ranks `who` wait for the other one to give up as well."""
    return 1.5 if who == (1,) else 60.0


def out_of_step(rank: int) -> None:
    sockets._FAILING = patience((0, 1))
    other_orders(rank, dist.new_group([0, 1]))
    for method, who in itertools.product(("forward", "backward"), ((1,), (0, 1))):
        broken_off(rank, dist.new_group([0, 1]), method, who)


def unprepared(rank: int) -> None:
    """All ranks fail between an agreement and its computation, then one does. None waits."""
    for holder, method, does, message, options in (
        (Ring, "plan", fail, "MemoryError: no memory left", {}),
        (RingPlan, "reserve", fail, "MemoryError: no memory left", {}),
        (InfLLMV2, "plan", refuse, "ValueError: no blocks", {"sparse": InfLLMV2()}),
    ):
        plain, group = getattr(holder, method), dist.new_group([0, 1])
        for who in ((0, 1), (1,)):
            setattr(holder, method, does if rank in who else plain)
            sockets._FAILING = patience(who)
            error = error_of(functools.partial(call, group, 8 + len(who), **options))
            told = "" if rank in who else "RankFailed: rank 1 of the group failed in call 2: "
            assert error.startswith(f"{told}{message}")
        setattr(holder, method, plain)


def fail(*_, **__) -> None:
    raise MemoryError("no memory left")


def refuse(*_, **__) -> None:
    raise ValueError("no blocks")


def interrupted(rank: int) -> None:
    """Rank 0 is interrupted while it waits for rank 1 to make a call, and goes on."""
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group([0, 1])
    call(group)
    if rank:
        store.wait(["rank 0 was interrupted"])
        errors = [error_of(lambda: call(group))]
    else:

        def interrupt(*_):
            raise MemoryError("interrupted")

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        assert error_of(lambda: call(group)) == "MemoryError: interrupted"
        store.set("rank 0 was interrupted", "")
        errors = []
    for error in (*errors, error_of(lambda: call(group))):
        assert "rank 0 of the group" in error
        assert "failed while it waited for the others: MemoryError: interrupted" in error


def first_call_alone(rank: int) -> None:
    """Rank 1 makes a group's first call only after rank 0 has waited for it in vain; then both call
    again. Errors name the rank that did not make it.
    """
    rings = make_rings(dist.new_group([0, 1]), (None, None))
    rings.inner.set_timeout(1.0)

    def attempt():
        gather_terms(rings, "a call of burst_attn_func", dict)

    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has waited"])
    error = error_of(attempt)
    store.set(f"rank {rank} has waited", "")
    if rank:
        kind, reason = "RankGone", "rank 0 of the group has ended, or cannot be reached at"
    else:
        kind, reason = "RankLate", "rank 1 of the group did not make this call"
    assert error.startswith(f"{kind}: a call of burst_attn_func: {reason}")
    assert error_of(attempt) == f"{error}; its group is unusable"


def groups_that_come_and_go(rank: int) -> None:
    """They leave no open files and threads."""
    files, threads = [], []
    for _ in range(4):
        group = dist.new_group([0, 1])
        differentiate(*call(group))
        dist.destroy_process_group(group)
        del group
        files.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    assert (files[0], threads[0]) == (files[-1], threads[-1])


def test_ranks_out_of_step_all_raise():
    """Works of two ranks, each with groups of its own."""
    works = groups_that_come_and_go, interrupted, first_call_alone, out_of_step, unprepared
    run_in_turn(2, *works)


class Deaf(Transport):
    """A ring that keeps why it was closed; with the error of another rank, if one is given."""

    rank, size = 0, 2

    def __init__(self, earlier: RuntimeError | None = None):
        self.messenger, self.earlier, self.reasons = self, earlier, []
        self.unusable = None

    def exchange(self, sends, recvs):
        raise AssertionError

    def close(self, reason):
        self.reasons.append(reason)
        self.unusable = RuntimeError(reason)

    def fail(self, reason, place):
        self.close(reason)
        return self.earlier


@pytest.mark.parametrize("earlier", [None, RankFailed("rank 1")])
def test_a_rank_that_fails_reports_it_over_both_rings(earlier):
    rings = Rings(Deaf(earlier), Deaf(), double=True)
    assert rings.fail("in call 1") is earlier
    assert rings.inner.reasons == rings.outer.reasons == ["in call 1"]


def test_a_rank_that_takes_the_inter_group_for_all_is_an_error_on_the_ranks_that_receive_it():
    def work(ring):
        groups = ring.subring([ring.rank]), ring
        q = torch.zeros(1, 6, 2, 8)
        burst_attn_func(q, q, q, double_group=groups)
        wrongly = {"process_group": ring} if ring.rank == 0 else {"double_group": groups}
        with pytest.raises(ValueError) as caught:
            burst_attn_func(q, q, q, **wrongly)
        return str(caught.value)

    first, second = simulate(2, work)
    assert first.startswith(
        "ranks do not do the same: rank 0 begins a call of burst_attn_func, rank 1 begins"
    )
    assert second.startswith(
        "rank 0 of the inter group passed it as process_group: expected packed lines, got '{"
    )


@pytest.mark.parametrize("fails", ["before", "in"])
def test_a_rank_that_fails_in_a_recomputation_is_reported_once(fails):
    def work(ring):
        runs = []

        def attend(q, k, v):
            runs.append(None)
            wrong = len(runs) == 2 and ring.rank == 1
            if wrong and fails == "before":
                raise KeyError("lost")
            return burst_attn_func(q, k, "lost" if wrong else v, process_group=ring)

        inputs = call(ring)[1]
        out = checkpoint(attend, *inputs, use_reentrant=False)
        error = error_of(lambda: differentiate(out, inputs))
        differentiate(*call(ring))
        return error

    other, failed = simulate(2, work)
    assert failed.startswith(
        "TypeError: v must be a torch.Tensor" if fails == "in" else "KeyError: 'lost'"
    )
    assert other.startswith("RanksDisagree: rank 1 of the group failed before ")
    assert "lost" in other or "v must be a torch.Tensor" in other


def test_a_recomputation_that_ends_with_a_call_is_no_failure(monkeypatch):
    """It would make the group unusable."""
    monkeypatch.setattr(Rings, "fail", fail)

    def work(ring):
        inputs = call(ring)[1]

        def attend(q, k, v):
            return burst_attn_func(q, k, v, causal=True, process_group=ring)

        expected = differentiate(attend(*inputs), inputs)
        found = differentiate(checkpoint(attend, *inputs, use_reentrant=False), inputs)
        return all(map(torch.equal, found, expected))

    assert all(simulate(2, work))


GRIDS = {  # the groups of hosts, and of places
    "crossed": [[(0, 1), (2, 3)], [(0, 3), (1, 2)]],
    "uneven": [[(0, 1, 2), (3,)], [(0, 3), (1,), (2,)]],
    "two grids": [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2), (1, 7), (4, 6), (5, 3)]],
    "swapped on rank 0": [[(0, 1), (2, 3)], [(0, 2), (1, 3)]],
    "swapped on rank 3": [[(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]],
}


@pytest.mark.parametrize("name", GRIDS)
def test_groups_that_are_no_grid_are_refused_on_every_rank(name):
    def work(ring):
        groups = [next(g for g in groups if ring.rank in g) for groups in GRIDS[name]]
        if name == f"swapped on rank {ring.rank}":
            groups.reverse()
        q = torch.zeros(1, 6, 2, 8)
        with pytest.raises(ValueError, match="double_group must be a grid"):
            burst_attn_func(q, q, q, double_group=tuple(map(ring.subring, groups)))
        return True

    assert all(simulate(sum(map(len, GRIDS[name][0])), work))


def test_a_model_is_attached_with_all_its_layers():
    model = torch.nn.Sequential(nn.BurstAttention(16, 2), nn.BurstAttention(16, 2))
    whole = nn.SequenceParallelModule()
    whole.model = model
    sp = SequenceParallel(1, 2, process_group=object())
    whole.attach(sp)
    assert all(part.sp is sp for part in (whole, *model))
    with pytest.raises(TypeError, match=r"sp must be a SequenceParallel, .*, got dict"):
        whole.attach(sp.groups)
    with pytest.raises(TypeError, match=r"sp must be a SequenceParallel, .*, got dict"):
        nn.BurstAttention(16, 2, sp={})


def test_who_does_not_come_is_waited_for_once():
    """A call within a call fails for want of a rank. The outer one does not wait for it again."""
    waits = []

    class Alone:
        size, shared = 2, ()

        def gather(self, message):
            waits.append(message)
            raise TimeoutError("rank 1 of the group did not make this call")

    def inner():
        gather_terms(Alone(), "the inner call", dict)

    with pytest.raises(TimeoutError, match="rank 1 of the group did not make this call"):
        gather_terms(Alone(), "the outer call", inner)
    assert len(waits) == 1
