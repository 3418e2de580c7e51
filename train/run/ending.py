"""The end of a rank's process: its last message and its exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from train.base import ranks
from train.base.files import leave_reason, print_error
from train.base.signals import INTERRUPTED, describe_stop, has_launcher
from train.run.watchdog import Watchdog


def acknowledge(signum: int) -> None:
    """Print that a signal arrived. A launcher does so itself."""
    if ranks.rank() == 0 and not has_launcher():
        print_error(describe_stop(signum))


def end_now(watchdog: Watchdog) -> NoReturn:
    """End the run at once after a second Ctrl-C, even in the middle of a step."""
    if ranks.rank() == 0:
        print_error(_join_sentences(f"ended now, in {watchdog.doing}", watchdog.last_words))
    os._exit(INTERRUPTED)


def run_rank(
    work: Callable[[], None], watchdog: Watchdog, advise: Callable[[], str] | None = None
) -> int:
    """Do all the work of a rank and leave the others. Return its exit code. `advise` tells how to
    save memory.
    """
    # reuse compiled kernels in the next run
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        work()
        if dist.is_initialized():
            watchdog.alive("leaving the other ranks")
            dist.destroy_process_group()
    except Exception as error:
        code = explain(error, watchdog, advise)
        if code is None:
            raise
        return code
    finally:
        watchdog.close()
    return 0


def explain(
    error: Exception, watchdog: Watchdog, advise: Callable[[], str] | None = None
) -> int | None:
    """Print why the run ends and where its last checkpoint is. Return the exit code: 2 for an error
    that would only happen again, LOST_CONTACT if another rank is the cause. Return None for an
    unexpected error, whose traceback the caller prints.

    An error that is the same on every rank is printed by rank 0 only. torchrun's summary gets the
    message of every rank.
    """
    program = watchdog.program
    rank, code, reported, speaks = ranks.rank(), None, "", True
    if isinstance(error, (ranks.RankError, FloatingPointError)):
        code, reported, speaks = 2, f"{program}: {error}", rank == 0
    # checked before OSError, since a TimeoutError is one: the other rank is the cause
    elif ranks.lost_contact(error):
        lost = f"rank {rank} lost contact with another rank, whose own message may say why"
        code, reported = ranks.LOST_CONTACT, f"{program}: {lost}; in {watchdog.doing}: {error}"
    elif isinstance(error, torch.OutOfMemoryError):
        lacking = f"rank {rank} ran out of memory in {watchdog.doing}"
        code, reported = 2, f"{program}: {_join_sentences(lacking, advise() if advise else '')}"
    elif isinstance(error, (ValueError, OSError)):
        code, reported = 2, f"{program}: rank {rank}: {error}"
    unexpected = f"{program}: rank {rank}: {type(error).__name__}: {error}".partition("\n")[0]
    leave_reason(
        _join_sentences(reported or unexpected, watchdog.last_words),
        cause=code != ranks.LOST_CONTACT,
    )
    if speaks and (words := _join_sentences(reported, watchdog.last_words)):
        print_error(words)
    return code


def _join_sentences(*sentences: str) -> str:
    return "; ".join(filter(None, sentences))


def run_script(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Call `main` with the arguments of the command line, and end the process with its code."""
    try:
        ranks.check_environment()
    except ValueError as error:
        print_error(reason := f"{Path(sys.argv[0]).name}: {error}")
        leave_reason(reason)
        _leave(2)
    try:
        _leave(main(sys.argv[1:]))
    except SystemExit as given:  # argparse has printed the reason
        _leave(given.code if isinstance(given.code, int) else 1)
    except BaseException:  # noqa: BLE001 - every process ends by `_leave`
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> NoReturn:
    """End the process at once. Its shutdown may wait for collectives that never end, and in torch
    2.13 a gloo thread that drops a tensor meanwhile aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full, or the terminal gone
            stream.flush()
    os._exit(code)
