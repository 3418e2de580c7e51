"""A copy of a rank's file in host memory. A thread writes it while the rank trains.

The memory is allocated once for a run. On GPUs it is pinned.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from train.checkpoints.rank_file import RankFile, write_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


class HostCopy:
    """Memory for a file, for a rank on `device`. Raises OSError if there is not enough."""

    def __init__(self, size: int, device: torch.device):
        # each page is mapped now, since page faults would slow down the first save
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        try:
            pages = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            wanted = f"{size:,} bytes of host memory for a copy of weights and optimizer"
            raise OSError(error.errno, f"{wanted}: {error.strerror}") from error
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)  # it keeps the mapping
        self._pinned = device.type == "cuda" and _pin(self._memory)

    def fill(self, file: RankFile) -> None:
        """Copy the bytes of `file` here. Afterwards its tensors may change."""
        file.copy_to(self._memory)

    def write(self, file: Path) -> dict[str, Any]:
        """Write the bytes to `file`. Return the manifest entry."""
        # hashing and writing release the interpreter's lock, so training continues
        return write_bytes(file, [self._memory])

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
        del self._memory


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory. Return whether it is. torch's own takes a power of two, up to twice as much."""
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


def available_memory() -> int:
    """Return the free bytes, also within the limits of a container or of a job of Slurm."""
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes below the limits of this process's control group, and of those around it."""
    own = next((x[3:] for x in _OWN_CGROUP.read_text().splitlines() if x.startswith("0::")), "/")
    folder = _CGROUP / own.strip("/")
    for group in (folder, *folder.parents):
        limit = group / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text())
            yield int(text) - used + int(stat["inactive_file"])  # cached files make room
