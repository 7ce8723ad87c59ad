"""A tree of TCP connections among the ranks, for small messages: a rank has its parent and at most sixteen children.

Each rank with children listens, publishes where in the job's store, and takes only those who know the secret that lies
there too. Nothing here is known to torch.distributed; whatever goes wrong is an OSError in the thread that uses it.
Needs no torch: the store is anything with ``set``, ``check`` and ``get``.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from ....traces.reasons import NotAgreeing
from .interfaces import reachable, this_host

FAN_OUT = 16
#: Between two questions to the store: at most, and at first.
WAIT_S, _FIRST_S = 1.0, 0.02
_FRAME = struct.Struct("<IB")  # bytes of the message, kind
_HELLO = struct.Struct("<8s16sI")  # magic, secret, rank
_MAGIC = b"DCCLNET1"
_LARGEST = 1 << 24
_TRY_S = 2.0  # for one address
_STRANGER_S = 5.0  # how long one that has connected may take to say who it is
_STORE_S, _SILENT_S = 10.0, 0.3  # to connect to the job's store; until it counts as waiting for what we say


def parent(rank: int) -> int:
    """The rank above."""
    return (rank - 1) // FAN_OUT


def children(rank: int, n_ranks: int) -> range:
    """The ranks right below."""
    first = rank * FAN_OUT + 1
    return range(min(first, n_ranks), min(first + FAN_OUT, n_ranks))


class _Peer:
    """One connection: what has come in and is not whole yet, and what has still to go out."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.sock, self.rank = sock, rank  # rank -1: it has not said yet who it is
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.since = time.monotonic()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that vanishes says nothing: the kernel asks after some 30 s, and gives up after 30 more.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Tree:
    """One rank's part of the tree. One thread uses it; :meth:`wake` and :meth:`close_inherited` are for others."""

    def __init__(self, rank: int, n_ranks: int, store: Any, store_host: str) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self.children = children(rank, n_ranks)
        self._store, self._host = store, store_host
        self._listener: socket.socket | None = None
        self._secret = b""
        self._above: _Peer | None = None
        self._below: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        self._poll = select.poll()
        self._by_fd: dict[int, _Peer] = {}
        self._stopped = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, limit_s: float) -> None:
        """Listen for the children and connect to the parent; waits for the parent until ``limit_s`` from now.

        Raises OSError, and what the store raises.
        """
        end = time.monotonic() + limit_s
        if self.children:
            self._listen()
        if self.rank:
            self._above = self._connect(end)

    def _parents_word(self, end: float) -> bytes:
        """What the parent has published. Asked for ever more rarely, not waited for: PyTorch warns of every wait that
        ends without an answer, and no thread may be inside the store when the interpreter ends.
        """
        key, pause = f"at/{parent(self.rank)}", _FIRST_S
        while not self._store.check([key]):
            if self._stopped:
                raise ConnectionAbortedError("closed")
            if time.monotonic() > end:
                raise TimeoutError(NotAgreeing.NO_STEP_IN_TIME(rank=parent(self.rank)))
            time.sleep(pause)
            pause = min(2 * pause, WAIT_S)
        return bytes(self._store.get(key))

    def _listen(self) -> None:
        bind, offered = reachable(self._host)
        if ":" in bind or (not bind and socket.has_dualstack_ipv6()):
            listener = socket.create_server((bind, 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=not bind)
        else:
            listener = socket.create_server((bind, 0), backlog=64)
        self._listener = listener
        listener.setblocking(False)
        self._poll.register(listener.fileno(), select.POLLIN)
        self._secret = secrets.token_bytes(16)
        # Same host: the loopback interface is always there, and no firewall is on it.
        where = {"host": this_host(), "at": offered, "here": bind or "127.0.0.1"}
        where |= {"port": listener.getsockname()[1], "secret": self._secret.hex()}
        self._store.set(f"at/{self.rank}", json.dumps(where))

    def _connect(self, end: float) -> _Peer:
        error: OSError = ConnectionError("it offers no address")
        while True:
            where = json.loads(self._parents_word(end))  # again: it may be of a process that was there before
            tried = [where["here"]] if where["host"] == this_host() else where["at"]
            if time.monotonic() >= end:
                break
            for address in tried:
                try:
                    left = max(0.1, min(_TRY_S, end - time.monotonic()))
                    sock = socket.create_connection((address, where["port"]), left)
                except OSError as refused:
                    error = refused
                    continue
                peer = self._register(sock, parent(self.rank))
                peer.outgoing += _HELLO.pack(_MAGIC, bytes.fromhex(where["secret"]), self.rank)
                self._flush(peer)
                return peer
            time.sleep(0.2)
        address = ", ".join(tried) or "any address"
        raise ConnectionError(NotAgreeing.UNREACHABLE(rank=parent(self.rank), address=address, error=error))

    def _register(self, sock: socket.socket, rank: int) -> _Peer:
        peer = _Peer(sock, rank)
        self._by_fd[sock.fileno()] = peer
        self._poll.register(sock.fileno(), select.POLLIN)
        return peer

    # -- messages --------------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """Children that have not connected."""
        return [child for child in self.children if child not in self._below]

    def up(self, kind: int, payload: bytes = b"") -> None:
        """Send to the parent. Raises OSError when it is gone."""
        assert self._above is not None
        self._send(self._above, kind, payload)

    def down(self, kind: int, payload: bytes = b"") -> None:
        """Send to all children that are there. Raises OSError when one is gone."""
        for peer in self._below.values():
            self._send(peer, kind, payload)

    def _send(self, peer: _Peer, kind: int, payload: bytes) -> None:
        peer.outgoing += _FRAME.pack(len(payload), kind) + payload
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.outgoing:
                del peer.outgoing[: peer.sock.send(peer.outgoing)]
        self._poll.modify(peer.sock.fileno(), select.POLLIN | (select.POLLOUT if peer.outgoing else 0))

    def wake(self) -> None:
        """End the other thread's :meth:`receive`."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """End the other thread's use of the tree: its :meth:`receive` raises."""
        self._stopped = True
        self.wake()

    def receive(self, timeout_s: float | None) -> Iterator[tuple[int, int, bytes]]:
        """(rank, kind, payload) of the messages that have come; waits for one, or for :meth:`wake`.

        Raises OSError when a connection is lost, or when a child cannot be taken in.
        """
        if self._stopped:
            raise ConnectionAbortedError("closed")
        left = False
        for peer in list(self._by_fd.values()):
            for message in self._whole(peer):  # a caller has left off in the middle
                left = True
                yield message
        if left:
            return
        if self._strangers:
            timeout_s = min(timeout_s, _STRANGER_S) if timeout_s is not None else _STRANGER_S
        for fd, events in self._poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                if self._stopped:
                    raise ConnectionAbortedError("closed")
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept(self._listener)
            elif (found := self._by_fd.get(fd)) is not None:
                peer = found
                if events & select.POLLOUT:
                    self._flush(peer)
                if events & ~select.POLLOUT:
                    yield from self._read(peer)
        for peer in [p for p in self._strangers if time.monotonic() - p.since > _STRANGER_S]:
            self._drop(peer)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            self._strangers.append(self._register(listener.accept()[0], -1))

    def _read(self, peer: _Peer) -> Iterator[tuple[int, int, bytes]]:
        try:
            part = peer.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            known = peer.rank
            self._drop(peer)
            if known >= 0:
                raise ConnectionError(NotAgreeing.LOST(rank=self.rank, other=known))
            return
        peer.incoming += part
        if peer.rank < 0 and not self._introduced(peer):
            return
        yield from self._whole(peer)

    def _whole(self, peer: _Peer) -> Iterator[tuple[int, int, bytes]]:
        """The messages of a peer that are here as a whole."""
        if peer.rank < 0:
            return
        while len(peer.incoming) >= _FRAME.size:
            length, kind = _FRAME.unpack_from(peer.incoming)
            if length > _LARGEST:
                raise ConnectionError(f"rank {peer.rank} sends what is no message")
            if len(peer.incoming) < _FRAME.size + length:
                return
            payload = bytes(peer.incoming[_FRAME.size : _FRAME.size + length])
            del peer.incoming[: _FRAME.size + length]
            yield peer.rank, kind, payload

    def _introduced(self, peer: _Peer) -> bool:
        """Whether a stranger has said the secret and is a child that was missing; else it is dropped."""
        if len(peer.incoming) < _HELLO.size:
            return False
        magic, secret, rank = _HELLO.unpack_from(peer.incoming)
        if magic != _MAGIC or not hmac.compare_digest(secret, self._secret) or rank not in self.missing():
            self._drop(peer)
            return False
        del peer.incoming[: _HELLO.size]
        self._strangers.remove(peer)
        peer.rank = rank
        self._below[rank] = peer
        if not self.missing() and self._listener is not None:  # nobody else is to come
            self._poll.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
        return True

    # -- the end ---------------------------------------------------------------------------------------------------

    def _drop(self, peer: _Peer) -> None:
        fd = peer.sock.fileno()
        self._by_fd.pop(fd, None)
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._poll.unregister(fd)
        peer.sock.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
        self._below.pop(peer.rank, None)

    def close(self) -> None:
        """Close everything; what was sent and lies in a buffer of ours is lost."""
        for peer in list(self._by_fd.values()):
            self._drop(peer)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the descriptors, without a word to the others: also in the child of a fork, whose they are not."""
        for peer in self._by_fd.values():
            peer.sock.close()
        if self._listener is not None:
            self._listener.close()
        if self._bell >= 0:
            bell, self._bell = self._bell, -1
            os.close(bell)


def takes_connections(host: str, port: int, patiently: bool = True) -> None:
    """Raises OSError where no connection to the job's store is to be had, a ConnectionError if it is the store's fault.

    PyTorch's own client would try again for half an hour, and warn each time: this process, or the store's, may be out
    of file descriptors. ``patiently`` waits until a server that is short of them would have hung up.
    """
    with socket.create_connection((host, port), _STORE_S) as connection:
        if not patiently:
            return
        connection.settimeout(_SILENT_S)
        with contextlib.suppress(TimeoutError):  # it waits for our first word, as it should
            connection.recv(1)
            raise ConnectionAbortedError("the job's store takes no more connections")
