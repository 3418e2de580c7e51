"""Work in several processes, with results in the order of the items."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items of each worker that are in progress, or wait for the result of an earlier one


class Worker:
    """A process that does one item after the other."""

    def __init__(self, make: Callable):
        # a forked process would share the locks and threads of tokenizers
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, item: object) -> None:
        with suppress(OSError):  # of a process that died, which `take` reports
            self.connection.send(item)

    def take(self, item: object) -> Any:
        """Return the result of the item given last. Raises ValueError if its work failed."""
        try:
            result, problem = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            raise ValueError(f"{item}: the worker process died with exit code {code}") from None
        if problem:
            raise ValueError(f"{item}: {problem}")
        return result

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def map_in_order(
    make: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield `make()(item)` for each item, by `workers` processes, or by this one. Only a few items,
    which can be pickled, are read in advance. Raises ValueError with the item if its work fails.
    """
    if workers == 1:
        work = make()
        for item in items:
            try:
                result = work(item)
            except Exception as error:
                raise ValueError(f"{item}: {_reason(error)}") from error
            yield result
        return
    pool: list[Worker] = []
    try:
        with _interrupts_later():
            pool.extend(Worker(make) for _ in range(workers))
        yield from _deal(pool, iter(items))
    finally:
        for worker in pool:
            worker.stop()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes started in it ignore Ctrl-C for good."""
    received: list[int] = []
    # threads that do not block the signal may still receive it
    before = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    resource_tracker.ensure_running()  # started now, because it unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which processes inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _deal(pool: list[Worker], items: Iterator) -> Iterator:
    """Yield results in order. Each worker has one item at a time, so no pipe fills up."""
    idle, done = list(pool), dict[int, Any]()
    busy: dict[Connection, tuple[Worker, int, object]] = {}
    given = taken = 0
    while True:
        while idle and given - taken < _AHEAD * len(pool):
            item = next(items, None)
            if item is None:
                break
            worker = idle.pop()
            worker.give(item)
            busy[worker.connection] = worker, given, item
            given += 1
        if not busy:
            return
        ready = wait(busy)
        for connection in [each for each in busy if each in ready]:
            worker, number, item = busy.pop(connection)
            done[number] = worker.take(item)
            idle.append(worker)
        while taken in done:
            yield done.pop(taken)
            taken += 1


def _serve(connection: Connection, make: Callable) -> None:
    """Answer each item with a result or an error until the other side closes the pipe."""
    work = None
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        answer: tuple[Any, str | None]
        try:
            work = work or make()
            answer = (work(item), None)
        except Exception as error:  # noqa: BLE001 - the other side raises it
            answer = (None, _reason(error))
        try:
            connection.send(answer)
        except OSError:
            return


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())
