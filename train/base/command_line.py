"""The command line of each script. It prints an error in one line, without the usage."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from train.base.files import leave_reason


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
        """End the process with the error that stopped the command."""
        self.exit(2, f"{self.prog}: {' '.join(str(error).split())}\n")
