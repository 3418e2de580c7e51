"""The file of one rank in a checkpoint, in safetensors' format: its shards and its RNG state.

safetensors' save_file needs all tensors in host memory, and a second pass for the hash. A RankFile
is hashed while it is written, piece by piece, also from a copy in host memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.base.files import writing
from train.engine import Shard

RNG = "rng/torch"
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_ALIGNMENT = 8  # of the header, in bytes
_PIECE = 1 << 26  # bytes that are written at once

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class RankFile:
    """A file: its `header`, with the places of tensors, and the `tensors`, flat, as bytes."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, shards: Mapping[str, Shard]) -> RankFile:
        """Return the file of `shards` and of the present RNG state."""
        tensors = {key: shard.flat for key, shard in shards.items()} | {RNG: torch.get_rng_state()}
        places = {key: (shard.start, shard.shape) for key, shard in shards.items()}
        ends = pairwise(accumulate((x.nbytes for x in tensors.values()), initial=0))
        described: dict[str, Any] = {"__metadata__": {"shards": json.dumps(places)}}
        for (key, x), offsets in zip(tensors.items(), ends, strict=True):
            described[key] = {
                "dtype": _DTYPES[x.dtype],
                "shape": list(x.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        parts = tuple(x.contiguous().view(torch.uint8) for x in tensors.values())
        return cls(len(text).to_bytes(8, "little") + text, parts)

    @property
    def size(self) -> int:
        return len(self.header) + sum(x.numel() for x in self.tensors)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The content as tensors of bytes, one after the other."""
        return (torch.frombuffer(bytearray(self.header), dtype=torch.uint8), *self.tensors)

    def write(self, file: Path) -> dict[str, Any]:
        """Write the file and make it survive a power failure. Return its manifest entry."""
        return write_bytes(file, self.parts)


def write_bytes(file: Path, parts: Iterable[Tensor]) -> dict[str, Any]:
    """Write tensors of bytes and sync the file. Return its manifest entry."""
    digest, size = hashlib.sha256(), 0
    with writing(file), open(file, "wb", buffering=0) as stream:
        for piece in (piece for part in parts for piece in part.split(_PIECE)):
            content = memoryview(piece.cpu().numpy())
            digest.update(content)
            while content:
                written = stream.write(content)
                content, size = content[written:], size + written
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


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
        """Copy the bytes of `file` here, and wait for GPUs. Afterwards its tensors may change."""
        parts = file.parts
        places = self._memory.split([x.numel() for x in parts])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part, non_blocking=True)
        if any(x.is_cuda for x in parts):
            torch.cuda.synchronize()

    def write(self, file: Path) -> dict[str, Any]:
        """Write the bytes to `file`. Return the manifest entry."""
        # hashing and writing release the interpreter's lock, so training continues
        return write_bytes(file, [self._memory])

    def close(self) -> None:
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
