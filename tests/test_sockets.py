"""Messages over sockets, between threads here, and the watch over ranks that send none any more."""

import json
import os
import random
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bmt_burst.errors import RankFailed, RankGone, RankLate
from bmt_burst.ranks.agreement import gather_terms, read_terms, report_failure
from bmt_burst.ranks.rings import Rings
from bmt_burst.transport import ALONE, sockets, watch
from bmt_burst.transport.sockets import SocketMessenger
from bmt_burst.transport.watch import Watch
from tests.launcher import run_threads
from tests.rings import Mute, wait_for_lost_rank


def run(size, work, store=None):
    """Run `work` with a messenger on each of `size` threads, and return the results."""
    store = store or dist.HashStore()

    def of_rank(rank):
        return work(SocketMessenger(rank, size, store, 60.0))

    return run_threads(*(partial(of_rank, rank) for rank in range(size)))


def test_a_stranger_is_not_taken_for_a_rank(monkeypatch):
    monkeypatch.setattr(sockets, "_GREETING", 0.2)
    store = dist.HashStore()

    def work(messenger):
        if messenger.rank == 1:
            store.wait(["address of 0"])
            address, port, _ = json.loads(store.get("address of 0"))
            for greeting in (b"", b"GET / HTTP/1.1", b"x" * 16 + b"\1\0\0\0"):
                stranger = socket.create_connection((address, port))
                stranger.sendall(greeting)
        return messenger.gather(b"%d" % messenger.rank)

    assert run(2, work, store) == [[b"0", b"1"]] * 2


def connected(size=2):
    return run(size, lambda messenger: messenger.gather(b"") and messenger)


def test_a_rank_that_has_ended_is_noticed_after_its_last_message():
    mine, theirs = connected()
    theirs._send(sockets._LINE, b"the last")
    for peer in theirs.peers.values():
        peer.connection.close()
    assert wait_for_lost_rank(mine) != ""
    assert mine.gather(b"mine") == [b"mine", b"the last"]
    for text in ("rank 1 of the group has ended", "rank 1 .* has ended; its group is unusable"):
        with pytest.raises(RankGone, match=text):
            mine.gather(b"again")
    assert wait_for_lost_rank(mine) == "rank 1 of the group has ended"


def test_who_fails_after_another_rank_learns_why(monkeypatch):
    monkeypatch.setattr(sockets, "_FAILING", 0.05)
    first, second = connected()
    assert first.find_lost_rank() == ""
    assert first.fail("in call 1: no memory", 2) is None
    assert wait_for_lost_rank(second) == "rank 0 of the group failed in call 1: no memory"
    earlier = second.fail("in call 1: a connection closed", 2)
    assert isinstance(earlier, RankFailed)
    assert str(earlier) == "rank 0 of the group failed in call 1: no memory"
    for messenger in (first, second):
        with pytest.raises(RuntimeError, match="no memory; its group is unusable"):
            messenger.gather(b"")


def test_messages_that_no_buffer_takes_are_sent_while_others_are_received():
    """Lines of double rings are packed, so they are longer than a line."""
    ranks, long = connected(3), [bytes([rank]) * (1 << 20) for rank in range(3)]
    for messenger in ranks:
        for peer in messenger.peers.values():
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)

    def gather(messenger):
        return messenger.gather(long[messenger.rank]) == long and messenger.gather(b"next")

    assert run_threads(*(partial(gather, x) for x in ranks), seconds=60.0) == [[b"next"] * 3] * 3
    ranks[0].timeout = 0.1
    with pytest.raises(RankLate, match=r"ranks 1, 2 of the group did not make this call within"):
        ranks[0].gather(long[0])  # nobody reads it


def test_forks_hold_no_connection():
    mine, theirs = connected()
    number = os.fork()
    if not number:
        time.sleep(2)
        os._exit(0)
    for peer in theirs.peers.values():
        peer.connection.close()
    with pytest.raises(RankGone):
        mine.gather(b"")
    assert os.waitpid(number, os.WNOHANG) == (0, 0)  # it lives
    os.waitpid(number, 0)


def test_a_thread_that_waits_for_a_rank_leaves_the_store_to_others():
    """Rank 0 opens group 1, then group 0. Rank 1 has a thread for each, of which the one for group
    0 is first. They share a connection to the store.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def open_groups(rank, store, groups, delay):
        time.sleep(delay)
        for group in groups:
            messenger = SocketMessenger(rank, 2, dist.PrefixStore(f"group {group}", store), 60.0)
            assert messenger.gather(b"here") == [b"here"] * 2

    mine, theirs = (
        dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        for _ in range(2)
    )
    works = [(0, mine, (1, 0), 0.0), (1, theirs, (0,), 0.0), (1, theirs, (1,), 0.3)]
    run_threads(*(partial(open_groups, *work) for work in works), seconds=20)


def take_step(rings: Rings, step: str) -> str:
    """Make a call of this kind, or one that fails before it or in its middle. Return the error."""

    def kind():
        if step == "fail":
            raise KeyError("wrong arguments")
        return {"kind": "a" if step == "break" else step}

    try:
        terms = read_terms(gather_terms(rings, "a call", kind))
        with report_failure(rings, "a call"):
            if step == "break":
                raise MemoryError("no memory left")
        return "" if all(term == terms[0] for term in terms) else "RanksDisagree"
    except (ValueError, RuntimeError, MemoryError, KeyError) as error:
        return type(error).__name__


def test_whatever_ranks_do_nothing_is_silent_and_none_hangs(monkeypatch):
    monkeypatch.setattr(sockets, "_FAILING", 0.02)
    for seed in range(200):
        chance, size = random.Random(seed), 2 + seed % 2
        program = chance.choices("ab", k=5)
        programs = [list(program) for _ in range(size)]
        for _ in range(chance.randint(0, 2)):
            wrong = chance.choice(programs)
            wrong[chance.randrange(5)] = chance.choice(("a", "b", "fail", "break", "end"))

        def work(messenger, programs=programs):
            ring, results = Mute(messenger), []
            ring.rank, ring.size = messenger.rank, messenger.size
            rings = Rings(ring, ALONE)
            messenger.gather(b"connected")
            for step in programs[messenger.rank]:
                if step == "end":
                    break
                results.append(take_step(rings, step))
            for peer in messenger.peers.values():  # the process ends
                peer.connection.close()
            return results

        found = run(size, work)
        if all(steps == program for steps in programs):
            assert found == [[""] * 5] * size
        lost = False  # whether a rank has ended or failed in an earlier call
        for number in range(5):
            steps = [steps[number] for steps in programs]
            kinds = {"a" if step == "break" else step for step in steps}
            errors = [errors[number] for errors in found if number < len(errors)]
            if lost or len(kinds) > 1 or "fail" in kinds:
                assert all(errors), (seed, number, programs, found)
            began = "fail" not in steps
            lost |= "end" in steps or (began and "break" in steps and set(steps) != {"break"})


class Ended(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("state", ["no rank is lost", "done", "failed", "waits", "is enqueueing"])
def test_a_process_ends_if_its_gpu_waits_for_a_lost_rank(state, monkeypatch, capsys):
    codes, event = [], SimpleNamespace(record=lambda: None, query=lambda: state == "done")

    def end(code):
        codes.append(code)
        raise Ended  # on the thread of the watch

    monkeypatch.setattr(watch.os, "_exit", end)
    monkeypatch.setattr(watch.torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(watch, "_EVERY", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    lost = "" if state == "no rank is lost" else "rank 1 of the group has ended"
    watched = Watch(SimpleNamespace(find_lost_rank=lambda: lost, timeout=0.1))
    watched.begin_call("call 7")
    if state != "is enqueueing":
        watched.end_call(state != "failed")
    is_stuck = state in ("waits", "is enqueueing")
    deadline = time.monotonic() + (30.0 if is_stuck else 0.3)
    while not codes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [1] * is_stuck
    text = "the GPU of this process waits for it in call 7, forever"
    assert (f"{lost}; {text}" in capsys.readouterr().err) == is_stuck


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (1, 2), (2, 1)])
def test_each_ring_watches_what_is_enqueued(inner, outer):
    """Ulysses between the ranks of a host and a ring between hosts both wait on streams."""
    noted = []
    rings = [
        SimpleNamespace(
            size=size,
            watch=SimpleNamespace(
                begin_call=lambda doing, name=name: noted.append(name),
                end_call=lambda is_enqueued, name=name: noted.append(name),
            ),
        )
        for name, size in (("inner", inner), ("outer", outer))
    ]
    rings = Rings(*rings, double=True)
    with report_failure(rings, "a call"):
        pass
    assert noted == (["inner"] * (inner > 1) + ["outer"] * (outer > 1)) * 2
