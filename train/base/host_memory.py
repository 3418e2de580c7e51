"""The host memory that this process may still use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


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
