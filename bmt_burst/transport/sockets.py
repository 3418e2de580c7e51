"""Messages between processes, on one host or on several, over a socket between each two of them.

A message is a head and some bytes. It takes some 10 us within a host. The system closes the sockets
of a process that ends, however it ends, and its peers notice at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..errors import RankFailed, RankGone
from .messenger import Messenger, make_late_error

_HEAD = struct.Struct("<cI")  # kind, length
# Kinds of messages. A rank sends _FAILED in place of its next line, and may go on if all ranks do.
# After _CLOSED it sends nothing.
_LINE, _FAILED, _CLOSED = b"L", b"F", b"C"
_HELLO = struct.Struct("<16sI")  # token, rank: what a rank sends first over a new connection
_FAILING = 5.0  # seconds in which all ranks must fail for their group to stay in use
_POLL = 1e-3  # seconds between two reads of the store
_POLLING = 2e-4  # seconds in which a rank polls for messages before it sleeps
_REASON = 1000  # characters of a reason that are sent
_GREETING = 5.0  # seconds in which a rank that calls sends its token
_RECEIVED = 1 << 16  # bytes that are received at once
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SocketMessenger(Messenger):
    """The messages of `size` processes, this one being `rank`. They connect in their first gather.

    store    where the ranks find each other's addresses. No other group has its keys.
    timeout  seconds to wait for a rank that does not send its message
    """

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: float):
        self.rank, self.size, self.store, self.timeout = rank, size, store, timeout
        self.peers: dict[int, _Peer] = {}  # in rank order, by the number of the socket's file
        self.arrivals = select.poll()
        self.unsent = set[int]()  # peers to which the rest of a message is sent later

    def _gather(self, message: bytes) -> list[bytes]:
        if self.size == 1:
            return super()._gather(message)
        try:
            if not self.peers:
                self._connect()
            return self._exchange(_LINE, message, self.timeout)
        except BaseException as error:  # others may have read the message
            if isinstance(error, RankFailed | RankGone):
                self.unusable = type(error)(str(error))  # without its traceback, which has tensors
            self.close(f"while it waited for the others: {type(error).__name__}: {error}")
            raise

    def fail(self, reason: str, place: int) -> RuntimeError | None:
        if self.unusable:
            return None
        mine = f"{place} {reason[:_REASON]}".encode()
        try:
            everyone = self._exchange(_FAILED, mine, _FAILING)
            if len({message.partition(b" ")[0] for message in everyone}) == 1:
                return None  # all ranks failed at this place
        except TimeoutError:
            pass  # another rank is still in the call, where it waits for this one
        except (RankFailed, RankGone) as error:
            self.unusable = type(error)(str(error))
        except BaseException:  # this rank is interrupted
            self.close(reason)
            raise
        earlier = self.unusable
        self.close(f"after another one: {earlier}" if earlier else reason)
        return earlier

    def close(self, reason: str) -> None:
        """Report the end of this rank's messages. Sockets stay open for what peers may send."""
        if not self.unusable:
            me = f"rank {self.rank} of the group, this one,"
            self.unusable = RuntimeError(f"{me} failed {reason}")
        self._send(_CLOSED, reason[:_REASON].encode())
        for peer in self.peers.values():
            with contextlib.suppress(OSError):  # the peer has ended
                peer.connection.shutdown(socket.SHUT_WR)

    def find_lost_rank(self) -> str:
        """Return why a rank sends nothing any more, or "". Other threads may ask."""
        ended = select.poll()
        for number in self.peers:
            ended.register(number, select.POLLRDHUP)
        return next((self.peers[number].describe_end() for number, _ in ended.poll(0)), "")

    def _connect(self) -> None:
        found = _open_connections(self.rank, self.size, self.store, self.timeout)
        self.peers = {found[rank].fileno(): _Peer(rank, found[rank]) for rank in sorted(found)}
        for number in self.peers:
            self.arrivals.register(number, select.POLLIN)
        # All that need it have read it. Messengers that ranks make later use the same store.
        self.store.delete_key(_key(self.rank))

    def _exchange(self, kind: bytes, message: bytes, seconds: float) -> list[bytes]:
        """Send a message and return the next one of all ranks, in rank order, within `seconds`.

        Raises RankLate, RankGone if a rank has ended, and RankFailed if a rank has closed the
        group, or failed while this one did not.
        """
        self._send(kind, message)
        found, began = {self.rank: message}, time.monotonic()
        while True:
            for peer in self.peers.values():
                if peer.rank not in found and (received := peer.take(kind)) is not None:
                    found[peer.rank] = received
            if len(found) == self.size and not self.unsent:
                break
            waited = time.monotonic() - began
            # Most messages come at nearly the same time. To wake up takes longer than to poll.
            if waited < _POLLING:
                self._receive(0.0)
            elif not self._receive(max(seconds - waited, 0.0)):
                busy = {self.peers[number].rank for number in self.unsent}
                late = [rank for rank in range(self.size) if rank not in found or rank in busy]
                raise make_late_error(late, seconds)
        self._receive(0.0)
        for peer in self.peers.values():
            peer.check_open(kind)
        return [found[rank] for rank in range(self.size)]

    def _send(self, kind: bytes, message: bytes) -> None:
        """Send a message, as far as the system takes it at once. `_receive` sends the rest."""
        packed = _HEAD.pack(kind, len(message)) + message
        for number, peer in self.peers.items():
            if not peer.send(packed):
                self.unsent.add(number)
                self.arrivals.modify(number, select.POLLIN | select.POLLOUT)

    def _receive(self, seconds: float) -> bool:
        """Receive what arrives first, within `seconds`, or send what is left. Return whether
        anything was received or sent.
        """
        ready = self.arrivals.poll(1e3 * seconds)
        for number, events in ready:
            peer = self.peers[number]
            if number in self.unsent and peer.send(b""):
                self.unsent.remove(number)
                self.arrivals.modify(number, select.POLLIN)
            if events != select.POLLOUT and not peer.receive():
                self.unsent.discard(number)
                self.arrivals.unregister(number)
        return bool(ready)


class _Peer:
    """The connection to another rank, what of its messages was received but not used yet, and what
    of this rank's was not sent yet.
    """

    def __init__(self, rank: int, connection: socket.socket):
        self.rank, self.connection = rank, connection
        self.unread = b""
        self.unsent = b""
        self.taken = b""  # the kind of the last message that was taken
        self.has_ended = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _connections.add(connection)

    def __del__(self) -> None:
        self.connection.close()

    def send(self, packed: bytes) -> bool:
        """Send what is left and `packed`, as far as the system takes it at once. Return whether
        nothing is left, or the rank receives no more.
        """
        waiting = self.unsent + packed
        try:
            sent = self.connection.send(waiting, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # the rank has ended. It may have sent why, which is found when it is read
            sent = len(waiting)
        self.unsent = b"" if self.has_ended else waiting[sent:]
        return not self.unsent

    def receive(self) -> bool:
        """Receive what has arrived. Return whether more can."""
        try:
            data = self.connection.recv(_RECEIVED)
        except OSError:  # the process was killed, or its host is lost
            data = b""
        self.unread += data
        self.has_ended = not data
        return not self.has_ended

    def take(self, kind: bytes) -> bytes | None:
        """Return the next message if it has arrived.

        Raises RankGone if the rank has ended without one, and RankFailed if it has closed the
        group, or failed while a line is expected.
        """
        found = _unpack(self.unread)
        if found is None:
            if self.has_ended:
                raise RankGone(f"rank {self.rank} of the group has ended")
            return None
        received, message = found
        if received == _CLOSED or (received == _FAILED and kind == _LINE):
            raise self._failure(received, message)
        self.unread = self.unread[_HEAD.size + len(message) :]
        self.taken = received
        return message

    def check_open(self, kind: bytes) -> None:
        """Raise RankFailed if the rank has closed the group after a message of this kind."""
        # It sent its line, and then waited in vain for this rank's. But if this rank fails, a rank
        # that sent a line closes the group because of that.
        found = _unpack(self.unread)
        if found and found[0] == _CLOSED and self.taken == kind:
            raise self._failure(*found)

    def describe_end(self) -> str:
        """Return why the rank sends no more messages, without receiving anything."""
        arrived = b""
        with contextlib.suppress(OSError):  # no reason arrived
            arrived = self.connection.recv(_RECEIVED, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        found = _unpack(self.unread + arrived)
        if found and found[0] != _LINE:
            return str(self._failure(*found))
        return f"rank {self.rank} of the group has ended"

    def _failure(self, kind: bytes, message: bytes) -> RankFailed:
        reason = message.decode().partition(" ")[2] if kind == _FAILED else message.decode()
        return RankFailed(f"rank {self.rank} of the group failed {reason}")


def _unpack(received: bytes) -> tuple[bytes, bytes] | None:
    """Return kind and text of the first message, if it is complete."""
    if len(received) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(received)
    message = received[_HEAD.size : _HEAD.size + length]
    return (kind, message) if len(message) == length else None


def _open_connections(
    rank: int, size: int, store: dist.Store, timeout: float
) -> dict[int, socket.socket]:
    """Return a connection to each other rank, which calls this one if it comes after it."""
    here, token = _find_own_address(store), secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with socket.create_server((here, 0), family=family, backlog=size) as server:
        store.set(_key(rank), json.dumps([here, server.getsockname()[1], token.hex()]))
        _wait_for_keys(store, range(rank), timeout)
        found = {peer: _call(peer, rank, store, timeout) for peer in range(rank)}
        server.settimeout(timeout)
        while len(found) < size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                late = [peer for peer in range(rank + 1, size) if peer not in found]
                raise make_late_error(late, timeout) from error
            if (peer := _read_caller(connection, token)) is not None:
                found[peer] = connection
    return found


def _wait_for_keys(store: dist.Store, peers: Sequence[int], timeout: float) -> None:
    # A wait inside the store would keep other threads of this process from it, which may be about
    # to make other groups that the other ranks wait for first.
    deadline = time.monotonic() + timeout
    while not store.check([_key(peer) for peer in peers]):
        if time.monotonic() > deadline:
            late = [peer for peer in peers if not store.check([_key(peer)])]
            raise make_late_error(late, timeout)
        time.sleep(_POLL)


def _call(peer: int, rank: int, store: dist.Store, timeout: float) -> socket.socket:
    """Return a connection to a rank that listens."""
    address, port, token = json.loads(store.get(_key(peer)))
    try:
        connection = socket.create_connection((address, port), timeout)
    except OSError as error:
        unreachable = f"has ended, or cannot be reached at {address}: {error}"
        raise RankGone(f"rank {peer} of the group {unreachable}") from error
    connection.settimeout(None)
    connection.sendall(_HELLO.pack(bytes.fromhex(token), rank))
    return connection


def _read_caller(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank that has called, or None for a stranger, who does not know the token."""
    connection.settimeout(_GREETING)
    with contextlib.suppress(OSError):
        hello = connection.recv(_HELLO.size)
        if len(hello) == _HELLO.size and secrets.compare_digest(hello[:16], token):
            connection.settimeout(None)
            return int(_HELLO.unpack(hello)[1])
    connection.close()
    return None


def _find_own_address(store: dist.Store) -> str:
    """Return this host's address in the network of the store's host."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, dist.TCPStore) else socket.gethostname()
    for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, but finds the way
            return str(probe.getsockname()[0])
    raise RuntimeError(f"expected a network in which {host} can be reached, found none")


def _key(rank: int) -> str:
    return f"address of {rank}"


def host_name() -> bytes:
    """Return this machine's name, in at most 300 bytes. NCCL distinguishes hosts by it, too."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    name = os.environ.get("NCCL_HOSTID") or f"{platform.node()[:200]} {boot}"
    return name.encode("ascii", "replace")[:300]


_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close a fork's copies of the sockets: they would hide that the rank ends before its forks."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_fork)
