"""The command line of each script. It prints an error in one line, without the usage."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from train.base.files import leave_reason

_UNITS = "KMBT"


def read_length(text: str) -> int:
    """Return a number of tokens, as in "131072" or "128K", where K is 1,024."""
    try:
        return int(text)
    except ValueError:
        length = _read_amount(text, 1024)
    if not length.is_integer():
        raise argparse.ArgumentTypeError(f"expected a whole number of tokens, got {text!r}")
    return int(length)


def read_total(text: str) -> float:
    """Return a total of tokens, as in "1e11" or "100B", where K is 1,000."""
    return _read_amount(text, 1000)


def _read_amount(text: str, thousand: int) -> float:
    power = _UNITS.find(text[-1:].upper() or " ") + 1
    try:
        return float(text[:-1] if power else text) * thousand**power
    except ValueError as error:
        expected = f"a number, with one of {', '.join(_UNITS)} behind it or without"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from error


class ArgumentParser(argparse.ArgumentParser):
    """A parser that reports an error in one line on stderr, and exits with code 2."""

    def __init__(self, prog: str, description: str | None, **settings: Any):
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, **settings}
        super().__init__(prog=prog, description=description, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process. torchrun's summary also shows an error message."""
        if status and message:
            leave_reason(message.strip())
        super().exit(status, message)

    def fail(self, error: Exception) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(str(error).split())}\n")
