"""What the commands share on their way in: errors of the command line take one line, not the usage
of every option.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from train.base.error_file import leave_reason


class ArgumentParser(argparse.ArgumentParser):
    """One whose errors, its own and those given to `error`, are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End with `status`. A message of what went wrong is on stderr, and in torchrun's summary
        if that runs this.
        """
        if status and message:
            leave_reason(message.strip())
        super().exit(status, message)

    def fail(self, error: Exception) -> NoReturn:
        """Ends with what kept the command from its work."""
        self.exit(2, f"{self.prog}: {' '.join(str(error).split())}\n")
