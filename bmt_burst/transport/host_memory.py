"""Messages between the processes of one host, through shared memory. A message takes microseconds,
less than over a socket.

Every rank has two places, which it uses in turn. A place holds the number of a message, its length,
a checksum of all, and the message. A rank overwrites a place only after every rank has written the
next message, and so has read this one. A processor may show the parts of a place in any order. The
checksum makes a message count only once it is complete.

A third place holds a rank's last words, which it writes when it breaks off a call that all ranks
had begun. A rank notices at once if a rank that it waits for has written last words, or if its
process has ended.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import RankFailed, RankGone, RankLate
from . import DEFAULT_TIMEOUT, make_late_error
from .mail import Mail

_HEAD = struct.Struct("<qqq")  # number, length, checksum
_SPINS = 200  # looks without a pause, some 0.1 ms
_PAUSE = 5e-5
_PLACES = 3  # of a rank: two for messages, one for its last words
_CHECKED = 0.5  # seconds between two checks whether the rank that is waited for has ended
_TENTATIVE, _FINAL = 1, 2  # kinds of last words: a rank may take back the first kind
_GIVING_UP = 5.0  # seconds in which all ranks must give up for their memory to stay in use


class HostMemory(Mail):
    """One rank's end of the shared memory.

    longest    bytes of the longest message
    processes  the result of `process_name` on each rank, "" if it is unknown
    timeout    seconds to wait for a rank that does not write its message
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: mmap.mmap,
        longest: int,
        processes: Sequence[str] = (),
        timeout: float = DEFAULT_TIMEOUT,
    ):
        super().__init__(rank)
        self.size, self.memory, self.processes, self.timeout = size, memory, processes, timeout
        self.place_bytes = _place_bytes(longest)
        self.number = 0

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order.

        Raises RankLate if a rank does not write one. That rank raises it too once it calls, since
        the others did not wait for it. Raises RankGone if a rank has ended and RankFailed if one
        has written last words, in this call and all later ones.
        """
        self.fail_if_broken()
        return self._exchange(message, _TENTATIVE)

    def give_up(self, words: bytes, place: bytes = b"") -> RuntimeError | None:
        """Write last words. If all ranks do within some seconds, at the same `place` of the same
        call, take them back: all may go on together.

        Otherwise this memory is unusable. Return the error of the rank that caused it, or None for
        this one.
        """
        self._write(self._find_words(self.rank), _TENTATIVE, words)
        deadline = time.monotonic() + _GIVING_UP
        others = [peer for peer in range(self.size) if peer != self.rank]
        while not all(self._read_words(peer) for peer in others):
            reason = self.find_lost_rank()
            if reason or time.monotonic() > deadline:
                self.broken = reason
                self.leave(words)
                return reason
            time.sleep(_PAUSE)
        try:
            self._exchange_same(b"all words are read " + place)
            self._write(self._find_words(self.rank), 0, b"")
            self._exchange_same(b"all words are taken back")
        except RuntimeError as error:  # another rank had stopped waiting just before these words
            self.broken = self.broken or error
            self.leave(words)
        return self.broken

    def leave(self, words: bytes) -> None:
        """Write last words that are not taken back."""
        super().leave(words)
        self._write(self._find_words(self.rank), _FINAL, words)

    def find_lost_rank(self) -> RankFailed | RankGone | None:
        """Return the error of the first rank that is known to take no further part."""
        losses = (self._find_loss(peer, _FINAL) for peer in range(self.size) if peer != self.rank)
        return next((loss for loss in losses if loss), None)

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds

    def _find_loss(self, peer: int, least: int) -> RankFailed | RankGone | None:
        """Return the error of a rank that takes no further part. Last words count from kind
        `least` on.
        """
        if words := self._read_words(peer, least):
            return RankFailed(f"rank {peer} of the group gave up {words}")
        if self.processes and has_ended(self.processes[peer]):
            process = self.processes[peer].partition(" ")[0]
            return RankGone(f"rank {peer} of the group has ended, process {process}")
        return None

    def _exchange(self, message: bytes, heeding: int) -> list[bytes]:
        """Gather messages. Last words count from kind `heeding` on."""
        self._send(message)
        try:
            return self._receive(message, heeding, time.monotonic())
        except TimeoutError:
            self._write(self._find_place(self.rank, self.number), -self.number, b"")
            raise

    def _exchange_same(self, message: bytes) -> None:
        """Gather the same message from all ranks, heeding only final words."""
        if set(self._exchange(message, _FINAL)) != {message}:
            raise RankFailed("ranks gave up at different places")

    def _send(self, message: bytes) -> None:
        self.number += 1
        self._write(self._find_place(self.rank, self.number), self.number, message)

    def _receive(self, message: bytes, heeding: int, began: float) -> list[bytes]:
        """Return the messages of all ranks, this one's being `message`."""
        return [
            message if peer == self.rank else self._wait_for(peer, heeding, began)
            for peer in range(self.size)
        ]

    def _wait_for(self, peer: int, heeding: int, began: float) -> bytes:
        """Return the message of a rank, once it is complete. It is late `timeout` seconds after
        `began`.
        """
        at, looks, checked = self._find_place(peer, self.number), 0, time.monotonic()
        loss = None
        while True:
            number, *_ = _HEAD.unpack_from(self.memory, at)
            if number == self.number and (message := self._read_message(at)) is not None:
                return message
            if number == -self.number or abs(number) > self.number:
                raise RankLate(
                    f"rank {peer} of the group gave up waiting for others to make this call"
                )
            if loss:  # found before this look, so no message follows
                self.broken = loss
                self.fail_if_broken()
            looks += 1
            if looks > _SPINS:
                time.sleep(_PAUSE)
            now = time.monotonic()
            if now - checked > _CHECKED:
                checked, loss = now, self._find_loss(peer, heeding)
            if now - began > self.timeout:
                raise make_late_error([peer], self.timeout)

    def _read_message(self, at: int) -> bytes | None:
        """Return the message in a place if it is complete."""
        number, length, checksum = _HEAD.unpack_from(self.memory, at)
        message = self.memory[at + _HEAD.size : at + _HEAD.size + length]
        return message if _checksum(number, message) == checksum else None

    def _write(self, at: int, number: int, message: bytes) -> None:
        head = _HEAD.pack(number, len(message), _checksum(number, message))
        self.memory[at : at + _HEAD.size + len(message)] = head + message

    def _read_words(self, peer: int, least: int = _TENTATIVE) -> str:
        """Return a rank's last words of kind `least` or above, "" without any."""
        at = self._find_words(peer)
        kind, *_ = _HEAD.unpack_from(self.memory, at)
        return (self._read_message(at) or b"").decode() if kind >= least else ""

    def _find_place(self, rank: int, number: int) -> int:
        return (_PLACES * rank + number % 2) * self.place_bytes

    def _find_words(self, rank: int) -> int:
        return (_PLACES * rank + 2) * self.place_bytes


def open_host_memory(
    rank: int,
    size: int,
    longest: int,
    gather: Callable[[bytes], list[bytes]],
    timeout: float = DEFAULT_TIMEOUT,
) -> HostMemory | None:
    """Return memory that all ranks share, or None on all of them if they are on several hosts.

    `gather` gathers messages in another way.
    """
    nbytes = size * _PLACES * _place_bytes(longest)
    made = _new_file(nbytes) if rank == 0 else b""
    try:
        [path, *_] = gather(made)
        memory = _map_file(path, nbytes)
        names = gather(process_name().encode() or b"unknown" if memory else b"")
    finally:
        if made:
            os.unlink(made)
    if memory is None or not all(names):
        return None
    # A process that seems to have ended now is only invisible from here, so it is not watched.
    processes = ["" if has_ended(name.decode()) else name.decode() for name in names]
    return HostMemory(rank, size, memory, longest, processes, timeout)


def process_name() -> str:
    """Return a name of this process for `has_ended`, "" if it has none.

    It has the process's number, the time when it began, and the namespace of such numbers.
    """
    try:
        return f"{os.getpid()} {_read_state(os.getpid())[1]} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def has_ended(name: str) -> bool:
    """Whether a process is known to have ended. False for one of another namespace, or without a
    name.
    """
    number, _, rest = name.partition(" ")
    began, _, namespace = rest.partition(" ")
    if not namespace or namespace != process_name().rpartition(" ")[2]:
        return False
    try:
        state, since = _read_state(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or since != began


def _read_state(process: int) -> tuple[str, str]:
    """Return a process's state and the time when it began, in the terms of proc(5).

    Raises OSError if the process does not exist.
    """
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _new_file(nbytes: int) -> bytes:
    """Make a file, in memory where possible. Return its path, empty if it does not fit."""
    name = None
    try:
        descriptor, name = tempfile.mkstemp(
            prefix="bmt_burst-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        with open(descriptor, "wb") as file:
            # without it the first write to a full file system would be fatal
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        if name:
            os.unlink(name)
        return b""
    return os.fsencode(name)


def _map_file(path: bytes, nbytes: int) -> mmap.mmap | None:
    """Return the file's memory, or None if it is missing: on another host, or in another
    container.
    """
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except OSError:
        return None


def _checksum(number: int, message: bytes) -> int:
    return zlib.crc32(message, zlib.crc32(_HEAD.pack(number, len(message), 0)))


def _place_bytes(longest: int) -> int:
    return -(-(_HEAD.size + longest) // 64) * 64
