"""Messages between the processes of one host, through memory that they share: microseconds, where sockets take more.

Every rank has two places, used in turn, that hold the number of a message, its length, a checksum of all, and itself.
A rank overwrites a place only after everyone has written the message after it, and so has read this one. The checksum
makes a message count only once it is all there, in whichever order a processor lets its parts be seen.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable

from bmt_burst import transport

_HEAD = struct.Struct("<qqq")  # number, length, checksum
_SPINS = 200  # looks without a pause, some 0.1 ms
_PAUSE = 5e-5


class HostMemory:
    """One rank's end. `longest` is the most bytes of a message."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap, longest: int):
        self.rank, self.size, self.memory = rank, size, memory
        self.place_bytes = _place_bytes(longest)
        self.number = 0

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order.

        Raises TimeoutError if a rank does not write one, on that rank too once it does: the others did not wait for it.
        """
        self.number += 1
        at = self._place(self.rank)
        head = _HEAD.pack(self.number, len(message), _checksum(self.number, message))
        self.memory[at : at + _HEAD.size + len(message)] = head + message
        try:
            return [message if peer == self.rank else self._read(peer) for peer in range(self.size)]
        except TimeoutError:
            self.memory[at : at + _HEAD.size] = _HEAD.pack(-self.number, 0, 0)
            raise

    def _read(self, peer: int) -> bytes:
        at, looks, began = self._place(peer), 0, time.monotonic()
        while True:
            number, length, checksum = _HEAD.unpack_from(self.memory, at)
            if number == self.number:
                message = self.memory[at + _HEAD.size : at + _HEAD.size + length]
                if _checksum(number, message) == checksum:
                    return message
            if number == -self.number or abs(number) > self.number:
                raise TimeoutError(f"rank {peer} of the group gave up waiting for others to make this call")
            looks += 1
            if looks > _SPINS:
                time.sleep(_PAUSE)
            if time.monotonic() - began > transport.AGREEMENT_TIMEOUT:
                waited = f"within {transport.AGREEMENT_TIMEOUT:.0f} s"
                raise TimeoutError(f"rank {peer} of the group did not make this call {waited}")

    def _place(self, rank: int) -> int:
        return (2 * rank + self.number % 2) * self.place_bytes


def open_host_memory(rank: int, size: int, longest: int, gather: Callable[[bytes], list[bytes]]) -> HostMemory | None:
    """Memory that all ranks share, or None on all of them if there is none. `gather` is another way for messages."""
    nbytes = 2 * size * _place_bytes(longest)
    made = _new_file(nbytes) if rank == 0 else b""
    [path, *_] = gather(made)
    memory = _map(path, nbytes)
    try:
        opened = gather(b"opened" if memory else b"")
    finally:
        if made:
            os.unlink(made)
    return HostMemory(rank, size, memory, longest) if all(opened) else None


def _new_file(nbytes: int) -> bytes:
    """A file's path, in memory where that can be; empty if there is no place for one."""
    name = None
    try:
        descriptor, name = tempfile.mkstemp(prefix="bmt_burst-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        with open(descriptor, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # or the first write to a full file system would be fatal
    except OSError:
        if name:
            os.unlink(name)
        return b""
    return os.fsencode(name)


def _map(path: bytes, nbytes: int) -> mmap.mmap | None:
    """The file's memory, or None if it is not there: on another host, or in another container."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except OSError:
        return None


def _checksum(number: int, message: bytes) -> int:
    return zlib.crc32(message, zlib.crc32(_HEAD.pack(number, len(message), 0)))


def _place_bytes(longest: int) -> int:
    return -(-(_HEAD.size + longest) // 64) * 64
