"""Real processes over gloo: equality, agreement and groups."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from bmt_burst import burst_attn_func, init_sequence_parallel
from bmt_burst.errors import RankGone, RankLate
from bmt_burst.ranks.groups import _count_ranks_a_host
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.transport.processes import ExchangeTicket
from bmt_burst.transport.torch_dist import TorchTransport, torch_transport
from tests import lightning
from tests.cases import call_tensors, random_layout, random_mask, random_qkv, random_two_lengths
from tests.launcher import run_ranks
from tests.reference import dense_results
from tests.refusals import refusal
from tests.rings import worst_rank_error
from tests.test_collectives import error_of_sums

RANDOM_MASKS = 5


def worst_error(groups: dict, rank: int, size: int, masks: int = RANDOM_MASKS) -> float:
    """Return the largest relative error of this rank's out, lse, dq, dk, dv over random masks.

    Every other mask has keys of another length or layout.
    """
    worst = 0.0
    for seed in range(masks):
        chance = random.Random(seed)
        mask = random_mask(chance, 29)
        whole, kv_layout = random_layout(chance, mask, size), None
        strategies = ["ring", "all-gather", "ulysses"]
        if seed % 2 and "strategy" not in groups:
            mask, whole, kv_layout = random_two_lengths(chance, size)
            strategies = ["ring", "one-call", "plain-ring"]
        options = {"mask": mask, "backward": chance.choice(("q", "kv")), "kv_layout": kv_layout}
        if not {"strategy", "double_group"} & groups.keys():
            options["strategy"] = chance.choice(strategies)
        call = KernelCall.whole(mask.seq_len, mask.kv_len)
        tensors = call_tensors(call, 2, 4, 2, 8, seed=29)
        call = rank, whole, tensors, dense_results(mask, tensors, 0.3), 0.3
        worst = max(worst, worst_rank_error(*call, **options, **groups))
    return worst


def equality(rank: int) -> list[float]:
    size = dist.get_world_size()
    errors = [worst_error({}, rank, size), lightning.worst_rank_error({}, rank, size)]
    x = torch.arange(3 * 13 * 2).view(3, 13, 2)
    for sp in [
        init_sequence_parallel(size),
        *([init_sequence_parallel(4, inner_size=2)] if size == 4 else []),
    ]:
        assert sp.unshard(sp.shard(x), 13).equal(x)
        assert sp.unshard(sp.shard(x.transpose(0, 1), 0), 13, 0).equal(x.transpose(0, 1))
        errors.append(error_of_sums(sp))
        with pytest.raises(ValueError, match="x, of 99 tokens along 1, to be"):
            sp.unshard(sp.shard(x), 99)
    if size == 4:
        sp = init_sequence_parallel(4, inner_size=2)
        groups = {"double_group": sp.double_group}
        errors.append(worst_error(groups, rank, size, masks=2))
        errors.append(lightning.worst_rank_error(groups, rank, size))
        for ulysses_size in (1, 2, 4):  # each way in which a rank may be alone
            sp = init_sequence_parallel(4, ulysses_size=ulysses_size)
            groups = {"process_group": sp.process_group, "double_group": sp.double_group}
            errors.append(worst_error({**groups, "strategy": "usp"}, rank, size, masks=2))
        sp = init_sequence_parallel(2)
        assert (sp.rank, sp.size) == (rank % 2, 2)
        errors.append(worst_error({"process_group": sp.process_group}, sp.rank, 2, masks=2))
        alone = init_sequence_parallel(1)
        errors.append(worst_error({"process_group": alone.process_group}, 0, 1))
    return errors


@pytest.mark.parametrize("size", [3, 4])
def test_gloo_ring_equals_dense(size):
    for errors in run_ranks(size, equality):
        assert max(errors) < 1e-10


def misuse(rank: int) -> None:
    """Get errors one after the other over the same group."""
    q, k, v = random_qkv(1, 6, 4, 2, 8)[:3]
    outsiders = dist.new_group([0])
    if rank == 1:
        with refusal("ValueError: expected a process_group with rank 1, got one without"):
            burst_attn_func(q, k, v, process_group=outsiders)
    with pytest.raises(ValueError, match="sp_size=3 does not divide the world of 2 ranks"):
        init_sequence_parallel(3)
    with pytest.raises(ValueError, match="inner_size=3 does not divide sp_size=2"):
        init_sequence_parallel(2, inner_size=3)
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        init_sequence_parallel(2, layout="ring")
    for wrong in ("2", True, 2.0):
        with pytest.raises(TypeError, match="sp_size must be a whole number, got"):
            init_sequence_parallel(wrong)
    sp = init_sequence_parallel(2)
    for x, message in (
        (torch.zeros(2 + rank, 3), r"differ in shape of unshard: .* \[2, 6\], .* \[3, 6\]"),
        (
            torch.zeros(2, 3).to((torch.int64, torch.int32)[rank]),
            "ranks differ in dtype of unshard",
        ),
        (
            torch.zeros(2, 3 - rank),
            "rank 1's x, of 6 tokens along 1, to be \\[2, 3\\], got \\[2, 2\\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            sp.unshard(x, 6)
    for arguments in ({"sp_size": 2 - rank}, {"sp_size": 2, "layout": ("zigzag", "striped")[rank]}):
        with pytest.raises(ValueError, match=r"ranks differ in (sp_size|layout) of init_seq"):
            init_sequence_parallel(**arguments)
    assert burst_attn_func(q, k, v).shape == q.shape  # the group is still in order


def test_an_exchange_that_failed_does_not_wait_for_its_first_parts_again():
    """gloo would wait forever for a part that is over."""
    over = []

    def fail():
        raise RankGone("rank 1 has ended")

    exchange = ExchangeTicket([lambda: over.append(1), fail], ((), ()))
    for _ in range(2):
        with pytest.raises(RankGone):
            exchange.wait()
    assert over == [1]


def interrupt(rank: int) -> float:
    """Return how long rank 0 waits for an exchange again, after an interrupt in its wait."""
    ring, x = torch_transport(dist.group.WORLD), torch.full((3,), float(rank))
    ring.set_timeout(20)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        ring.exchange([(x, 0)], []).wait()
        return 0.0

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        store.set("interrupted", "")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    exchange = ring.exchange([], [(x, 1)])
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.5, press).start()
        exchange.wait()
    began = time.monotonic()
    exchange.wait()
    assert x.tolist() == [1.0] * 3
    return time.monotonic() - began


def test_an_exchange_may_be_waited_for_again_after_an_interrupt():
    assert max(run_ranks(2, interrupt)) < 10


def interrupted_calls(rank: int) -> list[float]:
    """Return errors of calls that follow one which all ranks leave at some wait."""
    torch.set_num_threads(1)
    start, left = TorchTransport._start_over_gloo, [0]

    def start_with_interrupts(*arguments):
        wait = start(*arguments)

        def wait_or_leave(*seconds: float) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            wait(*seconds)

        return wait_or_leave

    TorchTransport._start_over_gloo = start_with_interrupts
    torch_transport(dist.group.WORLD).set_timeout(20)
    errors = []
    for strategy in ("ring", "ulysses", "plain-ring", "all-gather"):
        for number in (1, 2, 3, 5, 7):
            left[0] = number
            with pytest.raises(KeyboardInterrupt):
                worst_error({"strategy": strategy}, rank, 2)
            left[0] = 0
            errors.append(worst_error({"strategy": strategy}, rank, 2, masks=2))
    return errors


def test_calls_that_all_ranks_leave_leave_nothing_to_later_ones():
    assert max(map(max, run_ranks(2, interrupted_calls))) < 1e-12


def late(rank: int) -> None:
    """A rank that did not send in time is late again at once."""
    ring = torch_transport(dist.group.WORLD)
    ring.set_timeout(2)
    if rank == 0:
        exchange = ring.exchange([], [(torch.zeros(3), 1)])
        with pytest.raises(RankLate):
            exchange.wait()
        began = time.monotonic()
        with pytest.raises(RankGone):
            exchange.wait()
        assert time.monotonic() - began < 1
        dist.distributed_c10d._get_default_store().set("late", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["late"])


def test_an_exchange_that_failed_fails_again():
    run_ranks(2, late)


def test_misuse_on_one_rank_is_an_error_on_all():
    run_ranks(2, misuse)


def test_without_torch_distributed_there_are_no_groups_to_make():
    with pytest.raises(RuntimeError, match="init_process_group"):
        init_sequence_parallel()


def hosts_found(rank: int) -> tuple[int, int] | None:
    """Sizes of the double ring's groups where two ranks each have a host of their own."""
    os.environ["NCCL_HOSTID"] = f"host{rank // 2}"
    sp = init_sequence_parallel()
    intra, inter = sp.double_group
    assert sp.longest(sp.positions(31)).equal(torch.tensor(31))
    assert init_sequence_parallel(2).process_group is not None
    assert init_sequence_parallel(inner_size=4).process_group is not None
    dist.barrier()  # a rank that ends closes connections, which others may still be making
    return intra.size(), inter.size()


def test_hosts_are_found_for_the_double_ring():
    assert run_ranks(4, hosts_found) == [(2, 2)] * 4


@pytest.mark.parametrize(
    ("hosts", "sp_size", "ranks_a_host"),
    [
        ("aaaa", 4, 4),
        ("aabb", 4, 2),
        ("aabb", 2, 2),
        ("aaab", 4, 4),  # hosts of unlike size
        ("abab", 4, 4),  # ranks of a host are not neighbours
        ("aaaabbbb", 8, 4),
        ("aaaaaabb", 4, 4),  # one sequence on one host, one on two
        ("abcd", 4, 1),
    ],
)
def test_ranks_of_a_host(hosts, sp_size, ranks_a_host):
    assert _count_ranks_a_host(hosts, sp_size) == ranks_a_host
