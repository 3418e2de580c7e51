"""Messages between the processes of one host, through memory that they share: microseconds, where
sockets take more.

Every rank has two places, used in turn, that hold the number of a message, its length, a checksum
of all, and itself. A rank overwrites a place only after everyone has written the message after it,
and so has read this one. The checksum makes a message count only once it is all there, in whichever
order a processor lets its parts be seen.

A third place holds a rank's last words, which it leaves when it breaks off what all had begun
together. Who waits for a rank that has left some, or whose process has ended, learns of it at once.
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

from bmt_burst import transport

from ..errors import RankFailed, RankGone, RankLate

_HEAD = struct.Struct("<qqq")  # number, length, checksum
_SPINS = 200  # looks without a pause, some 0.1 ms
_PAUSE = 5e-5
_PLACES = 3  # of a rank: for two messages, and for its last words
# seconds of waiting after which, again and again, the rank waited for is looked after
_CHECKED = 0.5
_TENTATIVE, _FINAL = 1, 2  # kinds of last words: those that a rank may take back, and others
_GIVING_UP = 5.0  # seconds in which all ranks must give up for their memory to stay in use


class HostMemory:
    """One rank's end. `longest` is the most bytes of a message.

    processes  what `process_name` says on each rank, "" where that is not known
    patience   seconds after which a rank that does not write its message is an error,
               AGREEMENT_TIMEOUT if that is more
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: mmap.mmap,
        longest: int,
        processes: Sequence[str] = (),
        patience: float = 0.0,
    ):
        self.rank, self.size, self.memory, self.processes, self.patience = (
            rank,
            size,
            memory,
            processes,
            patience,
        )
        self.place_bytes = _place_bytes(longest)
        self.number = 0
        self.broken: RuntimeError | None = (
            None  # why this rank cannot go on with the others, once it is known
        )

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order.

        Raises TimeoutError if a rank does not write one, on that rank too once it does: the others
        did not wait for it. Raises RuntimeError if a rank has ended or left last words, now and
        whenever it is called again.
        """
        self._fail_if_broken()
        return self._exchange(message, _TENTATIVE)

    def give_up(self, words: bytes) -> RuntimeError | None:
        """Leaves last words. If all ranks do within some seconds, they are taken back, and all may
        go on together.

        Else this memory is of no use any more. Returns the error of the rank that is the
        reason, None if it is this one.
        """
        self._write(self._last_words(self.rank), _TENTATIVE, words)
        others, deadline = (
            [peer for peer in range(self.size) if peer != self.rank],
            time.monotonic() + _GIVING_UP,
        )
        while not all(self._words(peer) for peer in others):
            reason = self.find_lost_rank()
            if reason or time.monotonic() > deadline:
                self.broken = reason
                self.leave(words)
                return reason
            time.sleep(_PAUSE)
        try:
            self._exchange(b"all words are read", _FINAL)
            self._write(self._last_words(self.rank), 0, b"")
            self._exchange(b"all words are taken back", _FINAL)
        # another one had stopped waiting just before these words came
        except (RuntimeError, TimeoutError) as error:
            self.broken = self.broken or RankGone(str(error))
            self.leave(words)
        return self.broken

    def leave(self, words: bytes) -> None:
        """Leaves last words that are not taken back."""
        self.broken = self.broken or RuntimeError(
            f"rank {self.rank} of the group, this one, gave up {words.decode()}"
        )
        self._write(self._last_words(self.rank), _FINAL, words)

    def find_lost_rank(self) -> RankFailed | RankGone | None:
        """Return the error of the first rank that is known to take no further part."""
        losses = (self._find_loss(peer, _FINAL) for peer in range(self.size) if peer != self.rank)
        return next((loss for loss in losses if loss), None)

    def _find_loss(self, peer: int, least: int) -> RankFailed | RankGone | None:
        """Return the error of a rank that takes no further part; last words count from `least` on."""
        if words := self._words(peer, least):
            return RankFailed(f"rank {peer} of the group gave up {words}")
        if self._ended(peer):
            return RankGone(f"rank {peer} of the group has ended, process {self._process(peer)}")
        return None

    def _fail_if_broken(self) -> None:
        if self.broken:
            raise type(self.broken)(f"{self.broken}; its group is of no use any more")

    def _exchange(self, message: bytes, heeding: int) -> list[bytes]:
        """`gather`, `heeding` last words from such on."""
        self.number += 1
        self._write(self._place(self.rank), self.number, message)
        try:
            return [
                message if peer == self.rank else self._read(peer, heeding)
                for peer in range(self.size)
            ]
        except TimeoutError:
            self._write(self._place(self.rank), -self.number, b"")
            raise

    def _read(self, peer: int, heeding: int) -> bytes:
        at, looks, began = self._place(peer), 0, time.monotonic()
        checked = began
        while True:
            number, *_ = _HEAD.unpack_from(self.memory, at)
            if number == self.number and (message := self._message(at)) is not None:
                return message
            if number == -self.number or abs(number) > self.number:
                raise RankLate(
                    f"rank {peer} of the group gave up waiting for others to make this call"
                )
            looks += 1
            if looks > _SPINS:
                time.sleep(_PAUSE)
            now = time.monotonic()
            if now - checked > _CHECKED:
                checked, self.broken = now, self._find_loss(peer, heeding)
                self._fail_if_broken()
            if now - began > (patience := max(self.patience, transport.AGREEMENT_TIMEOUT)):
                raise transport.make_late_error([peer], patience)

    def _message(self, at: int) -> bytes | None:
        """The message in a place if it is all there."""
        number, length, checksum = _HEAD.unpack_from(self.memory, at)
        message = self.memory[at + _HEAD.size : at + _HEAD.size + length]
        return message if _checksum(number, message) == checksum else None

    def _write(self, at: int, number: int, message: bytes) -> None:
        head = _HEAD.pack(number, len(message), _checksum(number, message))
        self.memory[at : at + _HEAD.size + len(message)] = head + message

    def _words(self, peer: int, least: int = _TENTATIVE) -> str:
        """A rank's last words, "" if it has left none or they count for less."""
        at = self._last_words(peer)
        kind, *_ = _HEAD.unpack_from(self.memory, at)
        return (self._message(at) or b"").decode() if kind >= least else ""

    def _process(self, peer: int) -> str:
        return self.processes[peer].partition(" ")[0]

    def _ended(self, peer: int) -> bool:
        return bool(self.processes) and has_ended(self.processes[peer])

    def _place(self, rank: int) -> int:
        return (_PLACES * rank + self.number % 2) * self.place_bytes

    def _last_words(self, rank: int) -> int:
        return (_PLACES * rank + 2) * self.place_bytes


def open_host_memory(
    rank: int,
    size: int,
    longest: int,
    gather: Callable[[bytes], list[bytes]],
    patience: float = 0.0,
) -> HostMemory | None:
    """Memory that all ranks share, or None on all of them if there is none. `gather` is another way
    for messages.
    """
    nbytes = size * _PLACES * _place_bytes(longest)
    made = _new_file(nbytes) if rank == 0 else b""
    try:
        [path, *_] = gather(made)
        memory = _map(path, nbytes)
        names = gather(process_name().encode() or b"unknown" if memory else b"")
    finally:
        if made:
            os.unlink(made)
    # A process that cannot be seen from here is not known to have ended when it cannot be seen
    # later.
    processes = ["" if has_ended(name.decode()) else name.decode() for name in names]
    return HostMemory(rank, size, memory, longest, processes, patience) if all(names) else None


def process_name() -> str:
    """This process, as `has_ended` knows it: its number, when it began, and the namespace of such
    numbers; or "".
    """
    try:
        return f"{os.getpid()} {_state(os.getpid())[1]} {os.readlink('/proc/self/ns/pid')}"
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
        state, since = _state(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or since != began


def _state(process: int) -> tuple[str, str]:
    """A process's state and when it began, as proc(5) has them. Raises OSError if there is none."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _new_file(nbytes: int) -> bytes:
    """A file's path, in memory where that can be; empty if there is no place for one."""
    name = None
    try:
        descriptor, name = tempfile.mkstemp(
            prefix="bmt_burst-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        with open(descriptor, "wb") as file:
            # or the first write to a full file system would be fatal
            os.posix_fallocate(file.fileno(), 0, nbytes)
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
