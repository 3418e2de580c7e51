"""Ranks that begin calls before they have heard of each other: no mismatch is silent, none hangs.

Ranks are threads that take turns as a schedule has it, in time that passes only there. Their
messages go through shared memory and their calls through the real agreement. Only GPUs are a model:
the GPU of a rank finishes a call once all ranks have enqueued the same one at the same place.
"""

from __future__ import annotations

import itertools
import mmap
import random
import threading
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from bmt_burst.errors import RanksDisagree
from bmt_burst.ranks.agreement import (
    admit_one_thread,
    format_terms,
    gather_lines,
    mark_known_errors,
    read_terms,
    report_failure,
    run_together,
    settle,
)
from bmt_burst.ranks.rings import Rings
from bmt_burst.transport import ALONE, MESSAGE_BYTES, host_memory
from bmt_burst.transport.host_memory import HostMemory
from bmt_burst.transport.processes import ProcessTransport
from bmt_burst.transport.watch import Watch

CPU = torch.device("cpu")
CALL = "a call"
TIMEOUT, TICK = 20.0, 0.1  # seconds of the model
MOST_TURNS = 20_000
STEPS = ("a", "b", "backward", "synchronize", "fail", "break", "idle")
ERRORS = (ValueError, RuntimeError, MemoryError, KeyError)


class Ended(BaseException):
    """The process of a rank ends here."""


class Schedule:
    """Threads that run one at a time, and the time."""

    def __init__(self, size: int, seed: int):
        self.chance, self.now, self.turns = random.Random(seed), 0.0, 0
        self.running = list(range(size))
        self.may_run = [threading.Semaphore(0) for _ in range(size)]
        self.here = threading.local()
        self.failures: list[BaseException] = []

    def sleep(self, seconds: float = 0.0) -> None:
        """Let any rank go on."""
        rank = self.here.rank
        self.now += TICK
        self.turns += 1
        assert self.turns < MOST_TURNS, "a rank waits forever"
        following = self.chance.choice(self.running)
        if following != rank:
            self.may_run[following].release()
            self.may_run[rank].acquire()

    def run(self, works) -> None:
        def run(rank, work):
            self.here.rank = rank
            self.may_run[rank].acquire()
            try:
                work()
            except BaseException as failure:  # noqa: BLE001 - raised again below
                self.failures.append(failure)
            finally:
                self.running.remove(rank)
                if self.running:
                    self.may_run[self.chance.choice(self.running)].release()

        threads = [
            threading.Thread(target=run, args=arguments, daemon=True)
            for arguments in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self.may_run[self.chance.choice(self.running)].release()
        for thread in threads:
            thread.join(200)
        assert not any(thread.is_alive() for thread in threads)
        if self.failures:
            raise self.failures[0]


class Memory(HostMemory):
    """Shared memory in which others may run between any two accesses."""

    schedule: Schedule

    def _write(self, at, number, message):
        self.schedule.sleep()
        super()._write(at, number, message)
        self.schedule.sleep()

    def _read_message(self, at):
        self.schedule.sleep()
        return super()._read_message(at)


class Ring(ProcessTransport):
    """A ring whose ranks may run ahead."""

    def __init__(self, rank: int, size: int, mail: HostMemory, watch: Watch):
        self.rank, self.size = rank, size
        super().__init__()
        self.mail, self.watch = mail, watch

    def runs_ahead(self, device):
        return True

    def exchange(self, sends, recvs):
        raise AssertionError

    def _gather_remotely(self, message):
        raise AssertionError

    def symmetric_group(self):
        raise AssertionError


@dataclass
class Rank:
    """A rank with its GPU.

    enqueued  what its GPU has to do, in order
    sent      its messages by their numbers
    passed    the numbers of the calls and backwards that raised nothing, and what was enqueued
    raised    its errors
    """

    rings: Rings
    everyone: list[Rank]
    schedule: Schedule
    enqueued: list[str] = field(default_factory=list)
    sent: dict[int, bytes] = field(default_factory=dict)
    passed: list[tuple[int, list[str]]] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)
    forwards: list[tuple[int, int]] = field(default_factory=list)  # call, its message's number
    waits: int = 0
    ended: bool = False
    is_idle: bool = False

    @property
    def mail(self) -> HostMemory:
        return self.rings.inner.mail

    def run(self, program: list[str]) -> None:
        try:
            for step in program:
                self.schedule.sleep()
                try:
                    self.do(step)
                except ERRORS as error:
                    self.raised.append(error)
        except Ended:
            pass
        finally:
            self.ended = True

    def do(self, step: str) -> None:
        if step == "backward":
            if self.forwards:
                self.differentiate()
        elif step == "synchronize":
            self.synchronize()
        elif step == "idle":
            self.is_idle = True
            while not all(rank.ended or rank.is_idle for rank in self.everyone):
                self.schedule.sleep()
        elif step == "end":
            raise Ended
        else:
            self.attend(step)

    def attend(self, kind: str) -> None:
        history = self.rings.history
        number = history.calls + 1
        call = f"call {number}"

        def line():
            if kind == "fail":
                raise KeyError("wrong arguments")
            return format_terms(CALL, {"kind": "a" if kind == "break" else kind})

        with admit_one_thread(self.rings, CALL):
            lines = gather_lines(self.rings, CALL, line, history.agreed.get, call)
            with report_failure(self.rings, call):
                if lines not in history.agreed.values():
                    with mark_known_errors():
                        compare_kinds(read_terms(lines))
                    history.agreed[lines[0]] = lines
                history.calls = number
                self.enqueue(f"{call} {lines[self.rings.rank]}", kind)
        self.forwards.append((number, self.mail.number))

    def differentiate(self) -> None:
        call, forward = self.forwards.pop()
        doing = f"the backward of call {call}"
        with admit_one_thread(self.rings, doing):
            run_together(self.rings, doing, lambda: None, ahead=True)
            backward = self.mail.number
            with report_failure(self.rings, doing):
                self.enqueue(doing, "")
        settle(self.rings)
        self.passed += [(number, list(self.enqueued)) for number in (forward, backward)]

    def enqueue(self, what: str, kind: str) -> None:
        self.schedule.sleep()
        if kind == "break":
            raise MemoryError("no memory left")
        self.enqueued.append(what)

    def is_done(self) -> bool:
        """Whether the GPU has finished."""
        return all(other.enqueued[: len(self.enqueued)] == self.enqueued for other in self.everyone)

    def synchronize(self) -> None:
        """Wait for the GPU, as no exception ends: only the watch."""
        seen = None
        while not self.is_done():
            self.schedule.sleep()
            obstacle = self.mail.find_obstacle()
            seen = seen if obstacle and seen is not None else self.schedule.now
            if obstacle and self.schedule.now - seen > 5.0:
                self.raised.append(obstacle)
                raise Ended

    def note_sent(self) -> None:
        send, receive = self.mail._send, self.mail._receive

        def noted(message):
            self.sent[self.mail.number + 1] = message
            send(message)

        def counted(*arguments):
            self.waits += 1
            return receive(*arguments)

        self.mail._send, self.mail._receive = noted, counted


def compare_kinds(replies) -> None:
    if any(reply != replies[0] for reply in replies):
        raise RanksDisagree("ranks differ")


def run(programs: list[list[str]], seed: int, monkeypatch) -> list[Rank]:
    """Run a program on each rank. Check that whatever passed was the same on all ranks."""
    size = len(programs)
    schedule = Schedule(size, seed)
    clock = SimpleNamespace(sleep=schedule.sleep, monotonic=lambda: schedule.now)
    monkeypatch.setattr(host_memory, "time", clock)
    monkeypatch.setattr(host_memory, "_SPINS", 0)
    monkeypatch.setattr(host_memory, "_posting", weakref.WeakSet())
    ranks: list[Rank] = []
    monkeypatch.setattr(host_memory, "has_ended", lambda name: ranks[int(name)].ended)
    memory = mmap.mmap(-1, 3 * size * host_memory._place_bytes(MESSAGE_BYTES))
    Memory.schedule = schedule
    watch = SimpleNamespace(
        note_begun=lambda _: None, note_enqueued=lambda _: None, note_left=lambda: None
    )
    for rank in range(size):
        names = list(map(str, range(size)))
        mail = Memory(rank, size, memory, MESSAGE_BYTES, names, TIMEOUT)
        ranks.append(Rank(Rings(Ring(rank, size, mail, watch), ALONE), ranks, schedule))
        ranks[-1].note_sent()
    schedule.run([lambda r=r, p=p: r.run(p) for r, p in zip(ranks, programs, strict=True)])
    for number, enqueued in itertools.chain(*(rank.passed for rank in ranks)):
        said = [other.sent.get(number) for other in ranks]
        assert len(set(said)) == 1, (programs, seed, number, said)
        for other in ranks:  # its host may be behind
            both = min(len(enqueued), len(other.enqueued))
            assert other.enqueued[:both] == enqueued[:both], (programs, seed, number)
    return ranks


WARM = ["a", "backward", "b", "backward"]
AGAIN = ["a", "backward", "synchronize"]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_do_the_same_pass_and_wait_only_for_what_is_new(size, monkeypatch):
    for seed in range(30):
        program = [*WARM, *random.Random(seed).choices(("a", "b", "backward", "synchronize"), k=12)]
        for rank in run([program] * size, seed, monkeypatch):
            assert not rank.raised
            sent = len(rank.sent)
            assert sum(json == rank.sent[1] for json in rank.sent.values()) > 0
            assert rank.waits in (sent, sent - 1)  # the last one may be unread


def test_whatever_two_ranks_do_after_a_few_calls_nothing_is_silent(monkeypatch):
    """All pairs of programs of two steps, in one order or the other. If one ends within the other,
    only the longer one hears of it.
    """
    programs = [[*WARM, *steps, *AGAIN] for steps in itertools.product(STEPS, repeat=2)]
    pairs = itertools.combinations_with_replacement(programs, 2)
    for seed, pair in enumerate(pair[:: (1, -1)[n % 2]] for n, pair in enumerate(pairs)):
        ranks = run(pair, seed, monkeypatch)
        short, long = sorted(map(agreements, pair), key=len)
        hearing = [rank for rank in ranks if rank.raised]
        if short != long:
            assert len(hearing) >= (1 if short == long[: len(short)] else 2), (pair, seed)
        elif not {"fail", "break", "idle"} & {*pair[0], *pair[1]}:
            assert not hearing, (pair, seed)


def agreements(program: list[str]) -> list[str]:
    """Return the steps in which a rank agrees with others: no backward without a forward."""
    found, forwards = [], 0
    for step in program:
        if step in ("synchronize", "idle") or (step == "backward" and not forwards):
            continue
        forwards += {"a": 1, "b": 1, "backward": -1}.get(step, 0)
        found.append(step)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_any_programs_end(size, monkeypatch):
    for seed in range(400):
        chance = random.Random(seed)
        program = chance.choices(("a", "b", "backward", "synchronize"), k=6)
        programs = [[*WARM, *program] for _ in range(size)]
        for _ in range(chance.randint(1, 2)):
            wrong, at = chance.choice(programs), len(WARM) + chance.randrange(6)
            change = chance.choice(("drop", "insert", "replace"))
            wrong[at : at + (change != "insert")] = (
                [] if change == "drop" else [chance.choice((*STEPS, "end"))]
            )
        run(programs, seed, monkeypatch)


def test_what_was_never_read_is_printed_when_the_process_ends(capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "_posting", weakref.WeakSet())
    memory = mmap.mmap(-1, 6 * host_memory._place_bytes(MESSAGE_BYTES))
    mine, theirs = (HostMemory(rank, 2, memory, MESSAGE_BYTES) for rank in range(2))
    mine.post(b"a", [b"a", b"a"], "call 1")
    host_memory.report_unread()
    assert not capsys.readouterr().err
    theirs.post(b"b", [b"b", b"b"], "call 1")
    host_memory.report_unread()
    printed = capsys.readouterr().err
    assert "call 1 has wrong results: ranks do not do the same" in printed
    assert "rank 1 of the group says b" in printed
    assert "rank 0 of the group says a" in printed
    assert mine.collect() == theirs.collect() == [b"a", b"b"]
    host_memory.report_unread()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (1, 2), (2, 1)])
def test_each_ring_watches_what_is_enqueued(inner, outer):
    """Ulysses between the ranks of a host and a ring between hosts both wait on streams."""
    noted = []
    rings = [
        SimpleNamespace(size=size, note_enqueued=lambda doing, name=name: noted.append(name))
        for name, size in (("inner", inner), ("outer", outer))
    ]
    Rings(*rings, double=True).note_enqueued("a call")
    assert noted == ["inner"] * (inner > 1) + ["outer"] * (outer > 1)


def test_a_call_is_stuck_from_its_beginning_on():
    """A host may wait for its GPU also while it enqueues a call that it began ahead of others."""
    event = SimpleNamespace(record=lambda: None, query=lambda: False)
    watch = Watch(lambda: None, lambda: event, 60.0)
    assert watch.find_stuck_call() == ""
    watch.note_begun("call 1")
    assert watch.find_stuck_call() == "call 1"
    watch.note_left()
    assert watch.find_stuck_call() == ""
    watch.note_begun("call 2")
    watch.note_enqueued("call 2")
    watch.note_begun("call 3")
    assert watch.find_stuck_call() == "call 2"
    event.query = lambda: True
    assert watch.find_stuck_call() == "call 3"
    watch.note_enqueued("call 3")
    assert watch.find_stuck_call() == ""
