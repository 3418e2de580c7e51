"""A copy of a rank's file in host memory, from which a process writes it while the rank trains on.

The memory is a memfd: it has no name, so that nothing is left of it when both processes have ended,
and it does not count as /dev/shm. It is allocated once for a run. On GPUs it is pinned.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from train.base.signals import STOPPING
from train.checkpoints import writer
from train.checkpoints.rank_file import RankFile

_SIGNALS = {signal.SIGINT, *STOPPING}


class HostCopy:
    """Memory for a file of `size` bytes, of a rank on `device`. Raises OSError if there is not
    enough.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size
        with ExitStack() as undo:
            self._descriptor = os.memfd_create("checkpoint")
            undo.callback(os.close, self._descriptor)
            _allocate(self._descriptor, size)
            # the tensor keeps the mapping
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
            self._memory[:: mmap.PAGESIZE].zero_()  # maps each page now, not in the first save
            self._pinned = device.type == "cuda" and _pin(self._memory)
            undo.pop_all()

    def fill(self, file: RankFile) -> None:
        """Copy the bytes of `file` here. Afterwards its tensors may change."""
        file.copy_to(self._memory)

    def write(self, file: Path) -> dict[str, Any]:
        """Let a process write the bytes to `file`. Return the manifest entry.

        Raises OSError if the file cannot be written, and ChildProcessError if the process is
        killed. It is killed when the thread that calls this function ends.
        """
        place = [str(self._descriptor), str(self._size), str(file), str(os.getpid())]
        # -I and -S: a start in milliseconds, without packages
        line = [sys.executable, "-I", "-S", writer.__file__, *place]
        done = subprocess.run(
            line, pass_fds=[self._descriptor], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode == writer.FAILED:
            raise OSError(done.stdout.strip())
        if done.returncode:
            end = _describe_end(done.returncode)
            raise ChildProcessError(f"the process that writes {file} {end}")
        return {"bytes": self._size, "sha256": done.stdout.strip()}

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
        del self._memory
        os.close(self._descriptor)


def ignore_signals() -> None:
    """Block signals to stop in this thread and in the processes that it starts. A terminal or a
    scheduler sends them to all processes, and the file is to be finished.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _allocate(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        wanted = f"{size:,} bytes of host memory for a copy of weights and optimizer"
        raise OSError(error.errno, f"{wanted}: {error.strerror}") from error


def _describe_end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory, so that GPUs copy to it directly. If that is not possible, say so and return
    False.
    """
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) == 0:
        return True
    print(
        f"{memory.numel() / 2**30:.1f} GiB of host memory cannot be pinned "
        f"({cudart.cudaGetErrorString(code)}): saving stops training for longer",
        file=sys.stderr,
    )
    return False
