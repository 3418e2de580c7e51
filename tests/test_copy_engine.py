"""The protocol of deliveries by copy engines, on threads in place of streams, which copy late."""

import ctypes
import queue
import random
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bmt_burst import Layout, Mask, burst_attn_func, kernels, simulate
from bmt_burst.strategies import ring as ring_strategy
from bmt_burst.strategies.ulysses import heads
from bmt_burst.transport import LANES, Arrival, Put
from bmt_burst.transport.copy_engine import CopyEngines
from bmt_burst.transport.simulator import SimulatedRing
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import ring_arguments, worst_rank_error

_PATIENCE = 200.0  # seconds


class ThreadStream:
    """A stream whose work a thread does, in order and late. Its queue `work` may be shared."""

    longest_copy = 2e-3  # seconds

    def __init__(self, work):
        self.work = work

    def copy(self, target, source, nbytes):
        def late():
            time.sleep(random.random() * self.longest_copy)
            half = nbytes // 2  # not at one go
            ctypes.memmove(target, source, half)
            time.sleep(random.random() * 1e-3)
            ctypes.memmove(target + half, source + half, nbytes - half)

        self.work.put(late)

    def write(self, flags, value):
        def now():
            for flag in flags:
                flag.fill_(value)

        self.work.put(now)

    def wait(self, flags, value):
        self.work.put(lambda: spin(lambda: all(int(flag) >= value for flag in flags)))

    def record(self):
        event = threading.Event()
        self.work.put(event.set)
        return event

    def follow(self, event):
        self.work.put(lambda: spin(event.is_set))


def started_queue():
    def run():
        while True:
            work.get()()

    work = queue.SimpleQueue()
    threading.Thread(target=run, daemon=True).start()
    return work


class Inline:
    """The computing stream's queue: the rank's own thread, which may wait its turn in `work`."""

    def __init__(self, work=None):
        self.shared = work

    def put(self, work):
        if self.shared is None:
            work()
        else:
            done = threading.Event()
            self.shared.put(lambda: (work(), done.set()))
            assert done.wait(_PATIENCE), "a deadlock"


def spin(ready):
    end = time.monotonic() + _PATIENCE
    while not ready():
        assert time.monotonic() < end, "a deadlock"
        time.sleep(1e-5)


class EngineRing(SimulatedRing):
    """A simulated ring whose deliveries go by copy engines."""

    arenas: dict  # of all ranks

    def _device(self):
        shared = started_queue() if self.one_queue else None

        def connect(mine):
            self.arenas[self.members, self.rank] = mine.fill_(255)
            self.messenger.gather(b"")
            mine.zero_()
            self.messenger.gather(b"")
            return [self.arenas[self.members, rank] for rank in range(self.size)]

        def stream():
            lanes.append(ThreadStream(shared or started_queue()))
            return lanes[-1]

        def synchronize():
            for event in [lane.record() for lane in lanes]:
                spin(event.is_set)

        lanes = []
        allocate = partial(torch.empty, dtype=torch.uint8)
        own = ThreadStream(Inline(shared))
        return SimpleNamespace(
            rank=self.rank,
            size=self.size,
            stream=stream,
            current=lambda: own,
            synchronize=synchronize,
            allocate=allocate,
            connect=connect,
        )

    def reserve(self, lane_bytes, device):
        super().reserve(lane_bytes, device)
        if not hasattr(self, "engines"):
            self.engines = CopyEngines(self._device())
        if not self.engines.fits(lane_bytes):
            for step in self.engines.growth(lane_bytes):
                step()
                self.messenger.gather(b"")

    def mark(self, device):
        return self.engines.device.current().record()

    def _deliver(self, lane, nbytes, sends, arrivals, device, ready):
        for put in sends:
            self.traffic.append((put.peer, put.tensor.nbytes))
        return self.engines.deliver(lane, nbytes, sends, arrivals, ready)


def engine_ring(ring, arenas, one_queue):
    ring.__class__ = EngineRing
    ring.arenas, ring.one_queue = arenas, one_queue
    return ring


@pytest.mark.parametrize(
    ("inner", "outer", "options", "one_queue", "enough"),
    [
        (3, 1, {"backward": "q"}, True, 1),
        (3, 1, {"backward": "kv"}, False, 1 << 18),
        (3, 2, {"backward": "kv"}, True, 1 << 18),
        (3, 1, {"strategy": "ulysses"}, True, 60),
        (6, 1, {"strategy": "ulysses"}, False, 1 << 18),  # two ranks compute no heads
    ],
)
def test_calls_by_copy_engines_equal_dense(inner, outer, options, one_queue, enough, monkeypatch):
    """Several calls after each other, of growing and shrinking size, with all group sizes, in one
    pass or piece or more; one queue for all streams of a rank must do, since a GPU may have no
    more.
    """
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", enough)
    monkeypatch.setattr(heads, "_MOST_ROWS", enough)
    monkeypatch.setattr(heads, "_PIECE_WORK", 1)
    size, arenas = inner * outer, {}
    calls = [(17 * size, 0), (23 * size + 1, 1 << 30), (9 * size, 20_000), (17 * size, 0)]
    tensors = [random_qkv(2, tokens, 4, 2, 16, seed=seed) for seed, (tokens, _) in enumerate(calls)]
    exact = [dense_results(Mask.causal(each[0].shape[1]), each, 0.3) for each in tensors]

    def work(ring):
        rings = ring_arguments(ring, inner)
        for end in (rings.get("process_group") or rings["double_group"][0],):
            engine_ring(end, arenas, one_queue)
        worst = 0.0
        for (tokens, group_bytes), given, whole in zip(calls, tensors, exact, strict=True):
            call = ring.rank, Layout.zigzag(tokens, size), given, whole, 0.3
            more = {"causal": True, "group_bytes": group_bytes, **options, **rings}
            worst = max(worst, worst_rank_error(*call, **more))
        return worst

    assert max(simulate(size, work)) < 1e-13


def late_engines(ring, current):
    """Return copy engines of two ranks for streams of a test, next to those of an EngineRing."""
    ring.reserve(dict.fromkeys(LANES, 128), torch.device("cpu"))
    device = SimpleNamespace(**{**vars(ring.engines.device), "current": current})
    engines = CopyEngines(device)
    for step in engines.growth(dict.fromkeys(LANES, 128)):
        step()
        ring.messenger.gather(b"")
    return engines


@pytest.mark.parametrize(("count", "early"), [(1, False), (2, False), (2, True)])
def test_puts_leave_when_they_are_ready_and_may_change_after_a_wait_for_them(count, early):
    """With streams that compute late, as on a GPU: they fill each put, read what came, and spoil
    the put, before they read if `early`. It also goes to the rank itself. The release waits, too.

    A rank that reads late keeps its peer from the slot, also if the next one is read before, on
    another stream.
    """
    arenas = {}

    def work(ring):
        engine_ring(ring, arenas, one_queue=False)
        streams = [ThreadStream(started_queue()) for _ in range(count)]
        current = streams[0]
        engines = late_engines(ring, lambda: current)
        peer, seen, under_way = 1 - ring.rank, {}, []
        for value in range(12):
            current = streams[value % count]
            put = Put(torch.full((64,), 255, dtype=torch.uint8), peer, 0)
            current.work.put(lambda: time.sleep(2e-3))
            current.work.put(lambda x=put.tensor, value=value: x.fill_(value))
            puts = [put, Put(put.tensor, ring.rank, 64)]
            delivery = engines.deliver("visit", 128, puts, [Arrival(peer, 0, 64)])
            under_way.append((delivery, put.tensor))
            if len(under_way) == LANES["visit"]:
                delivery, sent = under_way.pop(0)
                delivery.wait()
                if early:
                    delivery.wait_for_sends()
                    current.work.put(lambda sent=sent: sent.fill_(254))
                current.work.put(lambda late=value % 2: time.sleep(0.1 * late * ring.rank))
                current.work.put(
                    lambda v=value, d=delivery: seen.update({v - 1: d.memory.tolist()})
                )
                delivery.release()
                current.work.put(lambda sent=sent: sent.fill_(254))
        for stream in streams:
            spin(stream.record().is_set)
        return seen

    ThreadStream.longest_copy = 0.02
    try:
        for seen in simulate(2, work):
            assert seen == {value: [value] * 128 for value in range(11)}
    finally:
        ThreadStream.longest_copy = 2e-3


def test_ranks_wait_only_for_what_they_receive():
    """Rank 1 is late to read its first delivery: it waits for what rank 0 receives in its third.
    Rank 2 sends that while it computes, since it was ready before. So rank 0 must not wait until
    its own third puts have left for rank 1, and rank 2's must not wait for its computation.
    """
    arenas, received = {}, threading.Event()

    def work(ring):
        engine_ring(ring, arenas, one_queue=False)
        stream = ThreadStream(started_queue())
        engines = late_engines(ring, lambda: stream)
        block = torch.full((8,), ring.rank + 1, dtype=torch.uint8)
        ready, seen = stream.record(), []
        if ring.rank == 2:
            stream.work.put(lambda: spin(received.is_set))  # computes
        for number in (1, 2, 3):
            to = {0: [1], 2: [0]}.get(ring.rank, [])
            sources = {0: [2], 1: [0]}.get(ring.rank, [])
            puts, arrivals = [Put(block, x, 0) for x in to], [Arrival(x, 0, 8) for x in sources]
            delivery = engines.deliver("visit", 8, puts, arrivals, ready)
            delivery.wait()
            if ring.rank == 1 and number == 1:
                stream.work.put(lambda: spin(received.is_set))
            stream.work.put(lambda d=delivery: seen.append(d.memory.tolist()))
            if ring.rank == 0 and number == 3:
                stream.work.put(received.set)
            delivery.release()
        spin(stream.record().is_set)
        return seen

    seen = simulate(3, work)
    assert seen[:2] == [[[3] * 8] * 3, [[1] * 8] * 3]


@pytest.mark.parametrize(
    ("inner", "method", "backward", "failing_call"),
    [
        (4, "forward", "kv", 1),
        (2, "forward", "kv", 3),
        (4, "backward", "q", 3),
        (2, "backward", "kv", 1),
        (4, "backward", "kv", 3),
    ],
)
def test_a_call_that_fails_on_all_ranks_leaves_the_transport_in_order(
    inner, method, backward, failing_call, monkeypatch
):
    """Memory runs out and the caller goes on with less, also while two passes are under way."""
    arenas, kernel, calls = {}, kernels.load("cpu"), threading.local()
    plain = getattr(kernel, method)

    def failing(*args, **options):
        calls.left = getattr(calls, "left", failing_call) - 1
        if calls.left == 0:
            raise MemoryError("no memory left")
        return plain(*args, **options)

    monkeypatch.setattr(kernel, method, failing)
    layout = Layout.zigzag(40, 4)
    q, k, v, dout = random_qkv(1, 40, 2, 2, 8)  # two passes of four calls

    def work(ring):
        rings = ring_arguments(ring, inner)
        engine_ring(rings.get("process_group") or rings["double_group"][0], arenas, one_queue=False)
        shards = [layout.shard(x, ring.rank).requires_grad_() for x in (q, k, v)]

        def call():
            out = burst_attn_func(*shards, 0.3, backward=backward, group_bytes=0, **rings)
            return torch.autograd.grad(out, shards, layout.shard(dout, ring.rank))

        with pytest.raises(MemoryError):
            call()
        return call()

    _, _, *exact = dense_results(Mask.full(40), [q, k, v, dout], 0.3)
    results = simulate(4, work)
    for i, expected in enumerate(exact):
        assert relative_error(layout.unshard([grads[i] for grads in results]), expected) < 1e-13
