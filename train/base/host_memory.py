"""The host memory that this process may still use."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that Linux could give to this process, also within a container's limit."""
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_left_in_container()])


def _left_in_container() -> list[int]:
    """Return the bytes below the limit of this process's control group, if it has one."""
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (text := limit.read_text().strip()) == "max":
        return []
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    used = int((_CGROUP / "memory.current").read_text())
    return [int(text) - used + int(stat["inactive_file"])]  # cached files make room
