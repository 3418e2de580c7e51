"""Work in several processes: its order, how far it runs ahead, and how it fails."""

import functools
import multiprocessing
import os
import signal
import threading
import time

import pytest

from train.base import parallel
from train.base.parallel import map_in_order


def squares(failing: int | None = None, dying: int | None = None):
    def work(number: int) -> int:
        if number == failing:
            raise KeyError(f"no {number}")
        if number == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01 * (number % 3))
        return number * number

    return work


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_only_a_few_items_are_taken_ahead(workers):
    taken = []
    items = (taken.append(number) or number for number in range(60))
    results = []
    for result in map_in_order(squares, items, workers):
        results.append(result)
        assert len(taken) - len(results) <= 4 * workers
    assert results == [number * number for number in range(60)]
    assert list(map_in_order(squares, [], workers)) == []


def test_a_worker_that_is_killed_ends_the_work_and_leaves_no_process():
    with pytest.raises(ValueError, match=r"^7: the worker process died with exit code -9$"):
        list(map_in_order(functools.partial(squares, dying=7), range(20), 2))
    assert not multiprocessing.active_children()
    for _ in map_in_order(squares, range(20), 2):
        break  # an abandoned iteration leaves none either
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("thread", [False, True], ids=["alone", "with a thread that may get it"])
def test_an_interrupt_while_processes_start_is_not_lost(monkeypatch, thread):
    """The processes neither get it nor stay."""
    done, started = threading.Event(), []
    threading.Thread(target=done.wait).start() if thread else None

    class Slow(parallel.Worker):
        def __init__(self, make):
            os.kill(os.getpid(), signal.SIGINT)
            super().__init__(make)
            started.append(self.process)
            os.kill(self.process.pid, signal.SIGINT)
            self.give(3)
            assert self.take(3) == 9

    monkeypatch.setattr(parallel, "Worker", Slow)
    with pytest.raises(KeyboardInterrupt):
        next(map_in_order(squares, range(20), 2))
    done.set()
    assert len(started) == 2
    assert not any(process.is_alive() for process in started)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
