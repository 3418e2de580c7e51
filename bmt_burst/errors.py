"""Errors about other ranks. Each subclasses a builtin error, so scripts may catch either.

RanksDisagree  ranks did not do the same. All ranks raise it before anything begins. Their group
               stays usable.
RankFailed     another rank failed in the middle of a call, or stopped waiting. The group is
               unusable.
RankGone       another rank has ended, or the connection to it is lost. The group is unusable.
RankLate       another rank did not make a call in time. The group is unusable.

All can be pickled, for example to send them to another process.
"""

from __future__ import annotations

__all__ = ["RankFailed", "RankGone", "RankLate", "RanksDisagree"]


class RanksDisagree(ValueError):
    """Ranks differ in the arguments of a call, or one of them failed before the call began."""


class RankFailed(RuntimeError):
    """Another rank failed in the middle of a call that all ranks had begun, or stopped waiting for
    this one. The text has its reason.
    """


class RankGone(RuntimeError):
    """Another rank has ended, or the connection to it is lost."""


class RankLate(RankGone, TimeoutError):
    """Another rank did not make a call in time."""
