"""Errors about other ranks. Each subclasses a builtin error, so scripts may catch either.

RanksDisagree  ranks did not do the same. All ranks raise it. Their group stays usable if nothing
               began. A rank that ran ahead says that it had begun.
RankFailed     another rank failed in the middle of a call. The group is unusable.
RankGone       another rank has ended, or the connection to it is lost. The group is unusable.
RankLate       another rank did not make a call in time

All can be pickled, for example to send them to another process.
"""

from __future__ import annotations

__all__ = ["RankFailed", "RankGone", "RankLate", "RanksDisagree"]


class RanksDisagree(ValueError):
    """Ranks differ in the arguments of a call, or one of them failed before the call began."""


class RankFailed(RuntimeError):
    """Another rank failed in the middle of a call that all ranks had begun. The text has its
    reason.
    """


class RankGone(RuntimeError):
    """Another rank has ended, or the connection to it is lost."""


class RankLate(RankGone, TimeoutError):
    """Another rank did not make a call in time, or it stopped waiting for this one before."""
