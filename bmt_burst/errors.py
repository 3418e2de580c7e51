"""Errors about other ranks. Each subclasses a builtin error, so scripts may catch either.

All can be pickled, for example to send them to another process.
"""

from __future__ import annotations

__all__ = ["RankFailed", "RankGone", "RankLate", "RanksDisagree"]


class RanksDisagree(ValueError):
    """Ranks differ in the arguments of a call, or one of them failed before the call began.

    All ranks raise it before anything begins. Their group stays usable.
    """


class RankFailed(RuntimeError):
    """Another rank failed in the middle of a call that all ranks had begun, or stopped waiting for
    this one. The text has its reason. The group is unusable.
    """


class RankGone(RuntimeError):
    """Another rank has ended, or the connection to it is lost. The group is unusable."""


class RankLate(RankGone, TimeoutError):
    """Another rank did not make a call in time. The group is unusable."""
