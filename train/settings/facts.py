"""The facts that a setting carries, and the forms of some texts.

Checks, the command line, stages, resuming and the comparison of ranks read the facts. So a new
setting is described in one place.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from train.base.wording import parse_pair


class Scope(enum.Flag):
    """The ranks, runs and stages between which a setting may differ: by default only stages.

    TECHNICAL   a resumed run may have another value: the result is the same, or compared itself
    HOST        each rank may have its own value
    PATH        each host may have its own path
    ALL_STAGES  all stages of a run have the same value
    ONE_STAGE   only the table of a stage may give it
    REPLACES    it replaces the model's field of its name, which a new stage may change
    """

    TECHNICAL = enum.auto()
    HOST = enum.auto()
    PATH = enum.auto()
    ALL_STAGES = enum.auto()
    ONE_STAGE = enum.auto()
    REPLACES = enum.auto()


TECHNICAL, HOST, PATH = Scope.TECHNICAL, Scope.HOST, Scope.PATH
ALL_STAGES, ONE_STAGE, REPLACES = Scope.ALL_STAGES, Scope.ONE_STAGE, Scope.REPLACES
NOWHERE = Scope(0)
_LARGEST = 2**63 - 1
_FORMS = (
    r"(?P<h>\d+):(?P<m>[0-5]?\d)(:(?P<s>[0-5]?\d))?",
    r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>[0-5]?\d)(:(?P<s>[0-5]?\d))?)?",
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_NAME = 128
_FORBIDDEN = "/\\#?%:"


@dataclass(frozen=True)
class Facts:
    """The facts about a setting.

    help       its text in --help
    choices    its values. None if there are others
    is_length  whether it is a number of tokens, which a command line may have as 128K
    least, below, positive, infinite
               the range of a number, and whether it may be infinite
    check      raises ValueError or TypeError for other values, except None
    no_stages  why runs with --stages refuse it
    instances  why models that read instances refuse it
    """

    help: str
    scope: Scope = NOWHERE
    choices: tuple[str, ...] | None = None
    is_length: bool = False
    least: int | None = None
    below: int | None = None
    positive: bool = False
    infinite: bool = False
    check: Callable[[Any], object] | None = None
    no_stages: str | None = None
    instances: str | None = None

    def check_value(self, option: str, value: Any) -> None:
        """Raise ValueError for a value that the setting `option` cannot have."""
        if value == "":
            raise ValueError(f"{option} must not be empty")
        if self.choices and value not in self.choices:
            raise ValueError(f"{option} must be one of {', '.join(self.choices)}, got {value!r}")
        if isinstance(value, int | float):
            self._check_number(option, value)
        if self.check is None or value is None:
            return
        try:
            self.check(value)
        except (TypeError, ValueError) as error:
            text = str(error)
            raise ValueError(text if text.startswith(option) else f"{option}: {text}") from error

    def _check_number(self, option: str, value: float) -> None:
        least, below = self.least, self.below
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{option} must be below 2^63, got {value}")
        if not math.isfinite(value) and not (self.infinite and value > 0):
            raise ValueError(f"{option} must be finite, got {value}")
        if least is not None and not least <= value < (below or math.inf):
            expected = "not be negative" if least == 0 else f"be at least {least}"
            expected = expected if below is None else f"be at least {least} and below {below}"
            raise ValueError(f"{option} must {expected}, got {value}")
        if self.positive and not value > 0:
            raise ValueError(f"{option} must be positive, got {value}")


def option(default: Any, help: str, scope: Scope = NOWHERE, **facts: Any) -> Any:
    return field(default=default, metadata={"facts": Facts(help, scope, **facts)})


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
