"""Messages through shared memory: between threads here, which share it as processes do, and between
processes.
"""

import mmap
import random
import threading
import time

import pytest
import torch.distributed as dist

from bmt_burst.errors import RankFailed
from bmt_burst.transport import host_memory
from bmt_burst.transport.host_memory import HostMemory, _place_bytes, open_host_memory
from bmt_burst.transport.torch_dist import TorchTransport
from tests.helpers import run_ranks

LONGEST = 100


def test_everyone_reads_everyones_messages_in_order():
    size, rounds = 4, 500
    memory = mmap.mmap(-1, 3 * size * _place_bytes(LONGEST))
    failures = []

    def work(rank):
        mine, chance = HostMemory(rank, size, memory, LONGEST), random.Random(rank)
        for number in range(rounds):
            if chance.random() < 0.05:
                time.sleep(chance.random() * 2e-3)
            expected = [f"{number} {peer}".encode() * (number % 7) for peer in range(size)]
            if mine.gather(expected[rank]) != expected:
                failures.append((rank, number))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_rank_that_does_not_call_is_named():
    memory = mmap.mmap(-1, 6 * _place_bytes(LONGEST))
    with pytest.raises(TimeoutError, match="rank 1 of the group did not make this call"):
        HostMemory(0, 2, memory, LONGEST, timeout=0.05).gather(b"here")


def test_who_comes_late_learns_that_the_others_gave_up_and_may_go_on_with_them():
    memory = mmap.mmap(-1, 6 * _place_bytes(LONGEST))
    ranks = [HostMemory(rank, 2, memory, LONGEST, timeout=0.05) for rank in range(2)]
    with pytest.raises(TimeoutError, match="rank 1 of the group did not make this call"):
        ranks[0].gather(b"first")
    with pytest.raises(TimeoutError, match="rank 0 of the group gave up waiting"):
        ranks[1].gather(b"first")
    for end in ranks:
        end.set_timeout(200.0)
    answers = {}
    again = [
        threading.Thread(target=lambda end=end: answers.update({end.rank: end.gather(b"again")}))
        for end in ranks
    ]
    for thread in again:
        thread.start()
    for thread in again:
        thread.join()
    assert answers == {0: [b"again"] * 2, 1: [b"again"] * 2}


def test_a_message_counts_once_it_is_whole():
    """A head that is seen before its message does not make it one."""
    memory = mmap.mmap(-1, 6 * _place_bytes(LONGEST))
    HostMemory(1, 2, memory, LONGEST)  # a place of rank 1, as if only the head were there yet
    at = (3 * 1 + 1) * _place_bytes(LONGEST)
    memory[at : at + host_memory._HEAD.size] = host_memory._HEAD.pack(1, 5, 12345)
    with pytest.raises(TimeoutError):
        HostMemory(0, 2, memory, LONGEST, timeout=0.05).gather(b"here")


def test_a_number_alone_does_not_make_an_older_message_new():
    memory = mmap.mmap(-1, 6 * _place_bytes(LONGEST))
    mine, theirs = (
        HostMemory(0, 2, memory, LONGEST, timeout=0.05),
        HostMemory(1, 2, memory, LONGEST),
    )
    for number in range(2):
        for end in (theirs, mine):
            end.number = number
            at = (3 * end.rank + (number + 1) % 2) * _place_bytes(LONGEST)
            message = b"old"
            head = host_memory._HEAD.pack(
                number + 1, len(message), host_memory._checksum(number + 1, message)
            )
            memory[at : at + len(head) + len(message)] = head + message
    at = (3 * 1 + 1) * _place_bytes(LONGEST)  # where rank 1 will write its third message
    memory[at : at + 8] = (3).to_bytes(8, "little")
    mine.number = 2
    with pytest.raises(TimeoutError):
        mine.gather(b"new")


def test_who_gives_up_just_after_another_stopped_waiting_hears_of_it(monkeypatch):
    monkeypatch.setattr(host_memory, "_GIVING_UP", 0.05)
    memory = mmap.mmap(-1, 6 * _place_bytes(LONGEST))
    first, second = (HostMemory(rank, 2, memory, LONGEST) for rank in range(2))
    assert first.give_up(b"call 1") is None
    for lost, text in (
        (second.give_up(b"call 1, too"), "rank 0 of the group gave up call 1"),
        (first.find_lost_rank(), "rank 1 of the group gave up call 1, too"),
    ):
        assert (type(lost), str(lost)) == (RankFailed, text)
    for end in (first, second):
        with pytest.raises(RuntimeError, match="gave up call 1; its group is unusable"):
            end.gather(b"again")


def test_without_common_memory_there_is_none_on_any_rank():
    """Rank 1 finds no file where rank 0 says it is, as on another host."""
    asked = []

    def gather(message):
        asked.append(message)
        return [message, b"" if len(asked) == 2 else message]

    assert open_host_memory(0, 2, LONGEST, gather) is None


def longest_of_many(rank: int) -> float:
    from bmt_burst.ranks.rings import make_rings

    ring = make_rings(None, (None, None)).inner
    for number in range(200):
        assert ring.gather(f"{rank} {number}".encode()) == [
            f"{peer} {number}".encode() for peer in range(ring.size)
        ]
    assert isinstance(ring.mail, HostMemory)
    return ring.size


def two_groups_at_once(rank: int) -> int:
    """Two threads that make the first calls on two groups, on each rank in another order."""
    rings = [TorchTransport(dist.new_group([0, 1])) for _ in range(2)]

    def first_call(ring, late):
        time.sleep(0.5 * late)
        assert ring.gather(b"here") == [b"here"] * 2

    turns = [(rings[rank], False), (rings[1 - rank], True)]
    threads = [threading.Thread(target=first_call, args=turn, daemon=True) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return sum(not thread.is_alive() for thread in threads)


def test_threads_may_open_groups_in_any_order():
    assert run_ranks(2, two_groups_at_once) == [2, 2]


def test_processes_of_a_host_use_it():
    assert run_ranks(3, longest_of_many) == [3] * 3
