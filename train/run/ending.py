"""How a rank's process ends: what it says, and with which code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from train.base.error_file import leave_reason
from train.base.files import print_error
from train.base.signals import INTERRUPTED, NOTED, has_launcher
from train.run import ranks
from train.run.watchdog import Watchdog


def acknowledge() -> None:
    """Says that a signal came; a launcher says so itself."""
    if ranks.rank() == 0 and not has_launcher():
        print_error(NOTED)


def end_now(watchdog: Watchdog) -> NoReturn:
    """What a second Ctrl-C does, in whatever the main thread is."""
    if ranks.rank() == 0:
        print_error(_join_sentences(f"ended now, in {watchdog.doing}", watchdog.last_words))
    os._exit(INTERRUPTED)


def explain(error: Exception, watchdog: Watchdog) -> int | None:
    """Says why the run ends and what it leaves; returns the exit code, None for an error that only
    a traceback tells.

    What is the same on every rank is said by one, but torchrun's summary has it of all.
    """
    rank, code, said, speaks = ranks.rank(), None, "", True
    if isinstance(error, (ranks.RankError, FloatingPointError)):
        code, said, speaks = 2, f"pretrain.py: {error}", rank == 0
    # before OSError, which TimeoutError is: the other rank is the cause
    elif ranks.lost_contact(error):
        lost = f"rank {rank} lost contact with another rank, whose own message may say why"
        code, said = ranks.LOST_CONTACT, f"pretrain.py: {lost}; in {watchdog.doing}: {error}"
    elif isinstance(error, (ValueError, OSError)):
        code, said = 2, f"pretrain.py: rank {rank}: {error}"
    unexpected = f"pretrain.py: rank {rank}: {type(error).__name__}: {error}".partition("\n")[0]
    leave_reason(
        _join_sentences(said or unexpected, watchdog.last_words), cause=code != ranks.LOST_CONTACT
    )
    if speaks and (words := _join_sentences(said, watchdog.last_words)):
        print_error(words)
    return code


def _join_sentences(*sentences: str) -> str:
    return "; ".join(filter(None, sentences))


def leave(code: int) -> NoReturn:
    """Ends the process at once: interpreter shutdown may wait for collectives that never end.

    torch 2.13 has a reason of its own: a gloo thread that drops a tensor meanwhile aborts the
    process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full, or the terminal gone
            stream.flush()
    os._exit(code)
