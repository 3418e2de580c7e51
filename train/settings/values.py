"""Texts of options that have a form of their own: steps, durations and names."""

from __future__ import annotations

import re
import sys

from train.base.wording import parse_pair

_FORMS = (
    r"(?P<h>\d+):(?P<m>[0-5]?\d)(:(?P<s>[0-5]?\d))?",
    r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>[0-5]?\d)(:(?P<s>[0-5]?\d))?)?",
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_NAME = 128
_FORBIDDEN = "/\\#?%:"


def parse_steps(text: str, steps: int) -> range:
    """Return the steps of FIRST:LAST. Raises ValueError unless a run of `steps` steps has them."""
    if (found := parse_pair(text)) is None:
        raise ValueError(f"--profile must be FIRST:LAST, two steps as in 5:7, got {text!r}")
    first, last = found
    if not 1 <= first <= last <= steps:
        raise ValueError(
            f"--profile {text} must name steps from 1 to --steps {steps}, the first one first"
        )
    return range(first, last + 1)


def parse_duration(text: str) -> float:
    """Return the seconds of --time-limit. Raises ValueError for any other form."""
    match = next(filter(None, (re.fullmatch(form, text) for form in _FORMS)), None)
    parts = match.groupdict(default="0") if match else {}
    seconds = sum(_SECONDS[unit] * int(count) for unit, count in parts.items())
    if not seconds:
        raise ValueError(
            "--time-limit must be hours and minutes as in 12:00, or HH:MM:SS, D-HH, D-HH:MM or "
            f"D-HH:MM:SS, and more than 0, got {text!r}"
        )
    return float(seconds)


def check_time_limit(text: str) -> None:
    """Raise ValueError for a --time-limit that is no duration, or on another system than Linux."""
    parse_duration(text)
    if sys.platform != "linux":
        raise ValueError("--time-limit needs Linux, which says when a process was started")


def check_project(name: str) -> None:
    """Raise ValueError for a name that wandb refuses."""
    if len(name) > _LONGEST_NAME or not set(name).isdisjoint(_FORBIDDEN):
        raise ValueError(
            f"--wandb must be a project's name of at most {_LONGEST_NAME} characters without "
            f"{' '.join(_FORBIDDEN)}, got {name!r}"
        )
