"""A store for ranks without PyTorch: one server, a connection a rank, the calls that the agreement makes."""

from __future__ import annotations

import contextlib
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
        self.requests = self.of_rounds = 0  # all; those of a round but to wait until it begins
        self.late_s = 0.0
        self._silent: tuple[str, float] = ("", 0.0)  # about what, until when
        self._dropping = 0.0  # until when
        self.values: dict[str, str] = {}
        self._waiting: list[tuple[socket.socket, list[str], float]] = []  # who, for what, until when
        self._kept: list[tuple[socket.socket, list[Any]]] = []  # requests that are not answered yet
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def silent_for(self, about: str, seconds: float) -> None:
        """Requests about keys with this word in them are answered only after so long."""
        self._silent = about, time.monotonic() + seconds

    def drops_for(self, seconds: float) -> None:
        """Whoever asks about a round within so long loses its connection."""
        self._dropping = time.monotonic() + seconds

    def _run(self) -> None:
        poll, peers = select.poll(), {}
        poll.register(self.listener, select.POLLIN)
        while True:
            self._let_go()
            for fd, _ in poll.poll(10 if self._waiting or self._kept else None):
                if fd == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    peers[sock.fileno()] = sock
                    poll.register(sock, select.POLLIN)
                    continue
                request = _receive(peers[fd])
                is_of_round = "/" in json.dumps(request) or "now" in (request or [])
                drops = time.monotonic() < self._dropping and is_of_round
                if request is None or drops:
                    poll.unregister(fd)
                    peers.pop(fd).close()
                    continue
                self.requests += request[0] != "meet"
                idle = str(request[1]).endswith(("begun", "/news"))
                self.of_rounds += "/" in str(request[1]) and not idle
                if self.late_s and request[0] != "meet":
                    time.sleep(self.late_s)
                about, until = self._silent
                if time.monotonic() < until and about in json.dumps(request):
                    self._kept.append((peers[fd], request))
                else:
                    self._answer(peers[fd], *request)

    def _answer(self, sock: socket.socket, kind: str, *args: Any) -> None:
        if kind == "meet":  # (name, ranks): a collective
            name, n_ranks = args
            self.values[name] = str(int(self.values.get(name, "0")) + 1)
            if int(self.values[name]) == n_ranks:
                self.values[f"{name} full"] = "yes"
                del self.values[name]
            self._waiting.append((sock, [f"{name} full"], float("inf")))
        elif kind == "multi_get" and not self._value("check", args[0]):
            self._kept.append((sock, [kind, *args]))  # as PyTorch's: until it is there
        else:
            _send(sock, [self._value(kind, *args)])

    def _let_go(self) -> None:
        """Answer who waits for what is there by now, or has waited long enough."""
        now = time.monotonic()
        if now >= self._silent[1]:
            kept, self._kept = self._kept, []
            for sock, request in kept:
                self._answer(sock, *request)
        for entry in [e for e in self._waiting if e[2] < now or all(key in self.values for key in e[1])]:
            self._waiting.remove(entry)
            with contextlib.suppress(OSError):  # a rank that was killed
                _send(entry[0], all(key in self.values for key in entry[1]))

    def _value(self, kind: str, key: Any, *args: Any) -> Any:
        if kind == "check":
            return all(one in self.values for one in key)
        if kind == "multi_get":
            return [self.values[one] for one in key]
        if kind == "add":
            self.values[key] = str(int(self.values.get(key, "0")) + args[0])
        elif kind == "set":
            self.values[key] = args[0]
        elif kind == "delete_key":
            return self.values.pop(key, None) is not None
        elif kind == "compare_set" and self.values.get(key, "") == args[0]:
            self.values[key] = args[1]
        return self.values.get(key)


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

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return str(self._ask("get", key)).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(value).encode() for value in self._ask("multi_get", keys)]

    def add(self, key: str, n: int) -> int:
        return int(self._ask("add", key, n))

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
        try:
            part = sock.recv(n - len(raw))
        except ConnectionError:  # of a rank that was killed
            return b""
        if not part:
            return b""
        raw += part
    return raw
