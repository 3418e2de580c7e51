"""The contract of a transport, checked on every transport of bmt_burst.transport.

A check runs on every rank of a ring. To add a transport, add a function that runs checks on its
ranks to RUNNERS. Transports that need GPUs or have no peers are listed in ELSEWHERE, with the tests
that check them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import pkgutil
import random
import time
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bmt_burst import simulate, transport
from bmt_burst.errors import RankFailed, RankLate
from bmt_burst.transport import ALONE, LANES, Arrival, Put, Transport, processes
from bmt_burst.transport.messenger import MESSAGE_BYTES
from bmt_burst.transport.simulator import SimulatedMessenger, SimulatedRing
from bmt_burst.transport.torch_dist import TorchTransport
from tests.launcher import run_ranks, run_threads
from tests.rings import wait_for_lost_rank

SIZE = 3
CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)

Check = Callable[[Transport], None]


def others(ring: Transport) -> list[int]:
    return [peer for peer in range(ring.size) if peer != ring.rank]


def message(sender: int, receiver: int, number: int) -> torch.Tensor:
    """Return a tensor that no other pair of ranks sends, of a length and dtype of its own."""
    length = 1 + 7 * number + 3 * sender + receiver
    values = torch.arange(length) + 100 * sender + 10 * receiver + number
    return (values % 251).to(DTYPES[number % len(DTYPES)])


def start_exchange(ring: Transport, numbers: range) -> Callable[[], None]:
    """Start messages to and from every other rank. Return a function that waits and checks."""
    sends = [(message(ring.rank, peer, n), peer) for peer in others(ring) for n in numbers]
    expected = [(message(peer, ring.rank, n), peer) for peer in others(ring) for n in numbers]
    recvs = [(torch.empty_like(x), peer) for x, peer in expected]
    ticket = ring.exchange(sends, recvs)

    def finish() -> None:
        ticket.wait()
        for (got, peer), (wanted, _) in zip(recvs, expected, strict=True):
            assert got.equal(wanted), f"rank {ring.rank} expected {wanted} from {peer}, got {got}"

    return finish


def check_a_ring_begins_usable(ring: Transport) -> None:
    assert (ring.size, ring.rank in range(SIZE)) == (SIZE, True)
    assert CPU.type in ring.device_types
    assert not ring.messenger.unusable and not ring.messenger.contested
    assert ring.held_bytes == 0


def check_ranks_are_in_order(ring: Transport) -> None:
    assert ring.messenger.gather(str(ring.rank).encode()) == [b"0", b"1", b"2"]


def check_messages_have_any_bytes_and_lengths(ring: Transport) -> None:
    for length in (0, 1, 255, 256, MESSAGE_BYTES, 8 * MESSAGE_BYTES):  # of a host with 8 ranks
        everyone = [random.Random(f"{length} {peer}").randbytes(length) for peer in range(SIZE)]
        assert ring.messenger.gather(everyone[ring.rank]) == everyone
    assert ring.messenger.gather(b"\0" * ring.rank) == [b"\0" * peer for peer in range(SIZE)]


def check_a_slow_rank_gets_every_message(ring: Transport) -> None:
    for number in range(12):
        if number % SIZE == ring.rank:
            time.sleep(2e-3)
        words = [f"{number} of {peer}".encode() for peer in range(SIZE)]
        assert ring.messenger.gather(words[ring.rank]) == words


def check_exchanges_keep_the_order_of_a_pair(ring: Transport) -> None:
    start_exchange(ring, range(6))()


def check_exchanges_may_overlap(ring: Transport) -> None:
    first = start_exchange(ring, range(3))
    second = start_exchange(ring, range(3, 5))
    check_ranks_are_in_order(ring)
    first()
    second()


def check_an_exchange_need_not_have_all_ranks(ring: Transport) -> None:
    ring.connect(CPU)
    x = torch.arange(5.0) if ring.rank == 0 else torch.zeros(5)
    sends = [(x, 2)] if ring.rank == 0 else []
    recvs = [(x, 0)] if ring.rank == 2 else []
    ring.exchange(sends, recvs).wait()
    assert x.equal(torch.zeros(5) if ring.rank == 1 else torch.arange(5.0))


def check_gathered_tensors_have_any_shapes(ring: Transport) -> None:
    for first in (0, 1):
        everyone = [torch.full((first + rank, 2), float(rank)) for rank in range(SIZE)]
        found = ring.all_to_all([everyone[ring.rank]] * SIZE, [x.shape for x in everyone])
        assert all(map(torch.equal, found, everyone))


def check_tensors_of_one_shape_are_gathered(ring: Transport) -> None:
    found = ring.gather_equal(torch.full((2, 3), ring.rank, dtype=torch.bfloat16))
    assert found.shape == (SIZE, 2, 3) and found.is_contiguous()
    assert found[:, 1, 2].tolist() == list(range(SIZE))


def deliver(ring: Transport, lane: str, number: int):
    """Start a delivery of 8 bytes from each other rank, in places in rank order."""
    places = {peer: 8 * place for place, peer in enumerate(others(ring))}
    sends = []
    for peer in others(ring):
        place = 8 * [rank for rank in range(SIZE) if rank != peer].index(ring.rank)
        value = float(100 * number + 10 * ring.rank + peer)
        sends.append(Put(torch.tensor([value], dtype=torch.float64), peer, place))
    arrivals = [Arrival(peer, place, 8) for peer, place in places.items()]
    return ring.deliver(lane, 8 * (SIZE - 1), sends, arrivals, CPU)


def assert_delivered(ring: Transport, number: int, memory: torch.Tensor) -> None:
    wanted = [float(100 * number + 10 * peer + ring.rank) for peer in others(ring)]
    assert memory.view(torch.float64).tolist() == wanted


def check_deliveries_have_their_places(ring: Transport) -> None:
    for nbytes in (8 * (SIZE - 1), 1 << 12):  # reserve again, for more
        ring.reserve(dict.fromkeys(LANES, nbytes), CPU)
        for number in range(5):
            for lane in LANES:
                delivery = deliver(ring, lane, number)
                delivery.wait()
                assert_delivered(ring, number, delivery.memory)
                delivery.release()


def check_a_rank_delivers_to_itself(ring: Transport) -> None:
    """Bytes of tensors of any shape and dtype, between those of other ranks."""
    ring.reserve(dict.fromkeys(LANES, 64), CPU)
    for lane in LANES:
        own, sent = torch.tensor([[2.5, ring.rank]]), torch.full((2, 1, 4), ring.rank).short()
        peer, source = (ring.rank + 1) % SIZE, (ring.rank - 1) % SIZE
        puts = [Put(sent, peer, 0), Put(own, ring.rank, 16), Put(sent[1], peer, 24)]
        arrivals = [Arrival(source, 0, 16), Arrival(source, 24, 8)]
        delivery = ring.deliver(lane, 32, puts, arrivals, CPU)
        delivery.wait()
        theirs = delivery.memory.view(torch.int16)
        assert theirs[[*range(8), *range(12, 16)]].tolist() == [source] * 12
        assert delivery.memory[16:24].view(torch.float32).tolist() == [2.5, ring.rank]
        delivery.release()


def check_what_was_sent_may_change_after_a_wait_for_it(ring: Transport) -> None:
    ring.reserve(dict.fromkeys(LANES, 8), CPU)
    after, before = (ring.rank + 1) % SIZE, (ring.rank - 1) % SIZE
    for lane in LANES:
        sent = torch.tensor([ring.rank])
        delivery = ring.deliver(lane, 8, [Put(sent, after, 0)], [Arrival(before, 0, 8)], CPU)
        delivery.wait()
        delivery.wait_for_sends()
        sent.fill_(-1)
        assert delivery.memory.view(torch.int64).tolist() == [before]
        delivery.release()


def check_a_lane_holds_its_number_of_deliveries(ring: Transport) -> None:
    ring.reserve(dict.fromkeys(LANES, 8 * (SIZE - 1)), CPU)
    for lane, most in LANES.items():
        under_way = []
        for number in range(4):
            under_way.append((number, deliver(ring, lane, number)))
            if len(under_way) == most:
                for earlier, delivery in under_way:
                    delivery.wait()
                    assert_delivered(ring, earlier, delivery.memory)
                for _, delivery in under_way:
                    delivery.release()
                under_way.clear()


def check_memory_that_is_not_recycled_stays(ring: Transport) -> None:
    ring.reserve(dict.fromkeys(LANES, 8 * (SIZE - 1)), CPU)
    first = deliver(ring, "return", 1)
    first.wait()
    memory, is_kept = first.memory, not first.recycled
    first.release()
    second = deliver(ring, "return", 2)
    second.wait()
    if is_kept:
        assert_delivered(ring, 1, memory)
    second.release()


def check_a_thread_at_a_time_holds_a_ring(ring: Transport) -> None:
    messenger = ring.messenger
    with messenger.in_use, messenger.in_use:  # the same thread may enter again
        [is_taken] = run_threads(lambda: messenger.in_use.acquire(False))
    assert not is_taken


def check_facts_about_another_ring_go_with_it(ring: Transport) -> None:
    class Other(Transport):
        def exchange(self, sends, recvs):
            raise AssertionError

    other = Other()
    ring.histories[other] = "a fact"
    assert list(ring.histories.values()) == ["a fact"]
    del other
    assert not ring.histories


def checks_above() -> dict[str, Check]:
    """Return the checks that are defined so far, by name."""
    return {
        name.removeprefix("check_"): check
        for name, check in globals().items()
        if name.startswith("check_")
    }


CHECKS = checks_above()

# The checks of transports whose ranks are processes: a rank may be late, or fail.


def check_a_late_rank_is_named(ring: Transport) -> None:
    check_ranks_are_in_order(ring)
    ring.set_timeout(1.0)
    if ring.rank == 1:
        time.sleep(2.5)
    with pytest.raises(RankFailed if ring.rank == 1 else RankLate, match="rank 1 of the group did"):
        ring.messenger.gather(b"here")


def check_a_rank_that_closes_makes_the_group_unusable(ring: Transport) -> None:
    check_ranks_are_in_order(ring)
    start_exchange(ring, range(1))()  # then all ranks have gathered
    if ring.rank == 1:
        ring.messenger.close("in a call: no memory")
    with pytest.raises(RuntimeError, match=r"rank 1 of the group.* failed in a call: no memory"):
        ring.messenger.gather(b"here")
    assert isinstance(ring.messenger.unusable, RankFailed) == (ring.rank != 1)
    if ring.rank != 1:  # it is lost, or another rank that has closed the group because of it
        assert "of the group" in wait_for_lost_rank(ring.messenger)


def check_ranks_that_all_fail_go_on(ring: Transport) -> None:
    check_ranks_are_in_order(ring)
    assert ring.messenger.fail("in a call: no memory", 3) is None
    assert not ring.messenger.unusable
    assert ring.messenger.find_lost_rank() == ""
    check_ranks_are_in_order(ring)


def check_ranks_that_fail_after_other_deliveries_do_not_go_on(ring: Transport) -> None:
    """They would receive each other's old deliveries."""
    check_ranks_are_in_order(ring)
    for _ in range(1 + (ring.rank == 0)):
        ring.deliver("visit", 0, [], [], torch.device("cpu")).release()
    ring.messenger.fail("in a call: no memory", ring.begun)
    with pytest.raises(RuntimeError, match="no memory; its group is unusable"):
        ring.messenger.gather(b"here")


def check_ranks_go_on_while_one_fails(ring: Transport) -> None:
    """The others are in their next call, whichever comes first."""
    check_ranks_are_in_order(ring)
    if ring.rank == 1:
        assert ring.messenger.fail("in a call: no memory", 3) is None
    with pytest.raises(RuntimeError, match=r"rank 1 of the group.* failed in a call: no memory"):
        ring.messenger.gather(b"here")


OF_PROCESSES = {name: check for name, check in checks_above().items() if name not in CHECKS}


def find_failure(work: Callable[[], object]) -> str:
    """Return the traceback of a check that failed, or "" if it passed."""
    try:
        work()
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is, it failed
        return traceback.format_exc()
    return ""


def run_simulated(
    kind: type[SimulatedRing] | type[SimulatedMessenger] = SimulatedRing,
) -> dict[str, str]:
    """Return the failure of each check on simulated ranks, "" where it passed."""
    found = {}
    for name, check in CHECKS.items():

        def work(ring: SimulatedRing, check: Check = check) -> None:
            part = ring if issubclass(kind, SimulatedRing) else ring.messenger
            part.__class__ = kind
            check(ring)

        found[name] = find_failure(functools.partial(simulate, SIZE, work))
    return found


def run_gloo_rank(rank: int) -> dict[str, str]:
    found = {}
    for name, check in {**CHECKS, **OF_PROCESSES}.items():
        group = dist.new_group(list(range(SIZE)))
        ring = TorchTransport(group)
        ring.messenger.gather(b"connected")
        ring.set_timeout(60.0)
        found[name] = find_failure(functools.partial(check, ring))
        dist.barrier()
    return found


def run_gloo() -> dict[str, str]:
    """Return the failure of each check on processes over gloo, "" where it passed on all ranks."""
    ranks = run_ranks(SIZE, run_gloo_rank)
    return {name: "".join(found[name] for found in ranks) for name in ranks[0]}


RUNNERS: dict[str, tuple[type[Transport], Callable[[], dict[str, str]]]] = {
    "simulator": (SimulatedRing, run_simulated),
    "gloo": (TorchTransport, run_gloo),
}
ELSEWHERE = {
    "Alone": "here, since it has no peers",
    "ImaginedRing": "tests/test_memory.py and tests/test_warming.py, since its peers send nothing",
    "BMTrainTransport": "tests/test_bmtrain.py and tests/test_gpu_train.py, since it needs GPUs",
}
CASES = [(ring, check) for ring in RUNNERS for check in CHECKS] + [
    (ring, check)
    for ring, (kind, _) in RUNNERS.items()
    if issubclass(kind, processes.ProcessTransport)
    for check in OF_PROCESSES
]


@functools.cache
def found_on(ring: str) -> dict[str, str]:
    return RUNNERS[ring][1]()


@pytest.mark.parametrize(("ring", "check"), CASES)
def test_a_transport_keeps_its_contract(ring, check):
    assert not found_on(ring)[check], found_on(ring)[check]


def test_every_transport_is_checked():
    for module in pkgutil.iter_modules(transport.__path__, f"{transport.__name__}."):
        importlib.import_module(module.name)
    left, classes = [Transport], set()
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if not inspect.isabstract(kind) and kind.__module__.startswith(transport.__name__):
            classes.add(kind.__name__)
    assert classes == {kind.__name__ for kind, _ in RUNNERS.values()} | set(ELSEWHERE)


def test_a_rank_alone():
    assert (ALONE.rank, ALONE.size, ALONE.messenger.gather(b"alone")) == (0, 1, [b"alone"])
    ALONE.exchange([], []).wait()
    assert pickle.loads(pickle.dumps(ALONE)) is ALONE
