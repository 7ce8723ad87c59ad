"""A store for ranks without PyTorch: one server, a connection a rank, the calls that the agreement makes."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from typing import Any

_LENGTH = struct.Struct("<I")


class StoreServer:
    """A key-value store for forked ranks, of one thread. Counts its requests; ``late_s`` delays each answer."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = self.listener.getsockname()[1]
        self.requests = self.requests_at_open = 0
        self.late_s = 0.0
        self.values: dict[str, str] = {}
        self._waiting: list[tuple[socket.socket, list[str]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll, peers = select.poll(), {}
        poll.register(self.listener, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    peers[sock.fileno()] = sock
                    poll.register(sock, select.POLLIN)
                    continue
                request = _receive(peers[fd])
                if request is None:
                    poll.unregister(fd)
                    peers.pop(fd).close()
                    continue
                self.requests += request[0] != "meet"
                if self.late_s and request[0] != "meet":
                    time.sleep(self.late_s)
                self._answer(peers[fd], *request)

    def _answer(self, sock: socket.socket, kind: str, *args: Any) -> None:
        if kind == "check":
            _send(sock, all(key in self.values for key in args[0]))
        elif kind == "opened":
            self.requests_at_open = self.requests
            _send(sock, True)
        elif kind == "get":
            _send(sock, self.values.get(args[0]))
        elif kind == "compare_set":
            key, expected, desired = args
            if self.values.get(key, "") == expected:
                self.values[key] = desired
            _send(sock, self.values.get(key, expected))
        elif kind == "meet":  # (name, ranks): a collective
            name, n_ranks = args
            self.values[name] = str(int(self.values.get(name, "0")) + 1)
            full = f"{name} full"
            if int(self.values[name]) == n_ranks:
                self.values[full] = "yes"
                del self.values[name]
            self._waiting.append((sock, [full]))
        else:
            if kind == "set":
                self.values[args[0]] = args[1]
            else:
                self.values.pop(args[0], None)
            _send(sock, True)
        for entry in [e for e in self._waiting if all(key in self.values for key in e[1])]:
            self._waiting.remove(entry)
            _send(entry[0], True)

    def until_in_force(self, generation: int) -> None:
        """Wait until the ranks run under a table."""
        end = time.monotonic() + 60
        while self.values.get("in force") != str(generation):
            if time.monotonic() > end:
                raise TimeoutError(f"generation {generation} never came into force")
            time.sleep(0.005)

    def enough(self) -> None:
        """The job of a run with ``until_stopped`` is to end."""
        self.values["enough"] = "yes"


class Store:
    """A rank's connection, with the methods of PyTorch's stores that the agreement uses."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            _send(self._sock, request)
            answer = _receive(self._sock)
        if answer is None:
            raise ConnectionError("the store is gone")
        return answer[0]

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return str(self._ask("get", key)).encode()

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._ask("compare_set", key, expected, desired)).encode()

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def meet(self, name: str, n_ranks: int) -> None:
        """All ranks are here."""
        self._ask("meet", name, n_ranks)


def _send(sock: socket.socket, what: Any) -> None:
    raw = json.dumps(what if isinstance(what, (list, tuple)) else [what]).encode()
    sock.sendall(_LENGTH.pack(len(raw)) + raw)


def _receive(sock: socket.socket) -> Any:
    head = _exactly(sock, _LENGTH.size)
    body = _exactly(sock, _LENGTH.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(sock: socket.socket, n: int) -> bytes:
    raw = b""
    while len(raw) < n:
        part = sock.recv(n - len(raw))
        if not part:
            return b""
        raw += part
    return raw
