"""Connections of our own to the job's store.

With the job's own we would keep its server alive after its group is gone, and wait where the job wants to ask. At
the end of a job whose rank 0 hosts the store nothing is asked of it: PyTorch would write 20 lines about that.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

#: To connect to the job's store; until it counts as waiting for what we say.
_CONNECT_S, _SILENT_S = 10.0, 0.3


class StoreConnections:
    """Makes them, of the default process group of now."""

    def __init__(self, c10d: Any) -> None:
        """``c10d``: ``torch.distributed.distributed_c10d``."""
        self._c10d = c10d
        self._store = c10d._get_default_store()
        base = getattr(self._store, "_underlying_non_prefix_store", self._store)
        self._host = getattr(base, "host", "") or os.environ.get("MASTER_ADDR", "")
        self._port = getattr(base, "port", 0)

    def __call__(self) -> Any:
        """A new connection. Raises OSError."""
        if self._port:
            _takes_connections(self._host, self._port)
        before = _sockets_to(self._port)
        self._store = self._store.clone()
        store = self._c10d.PrefixStore("dynamiccl", self._store)
        ours = _sockets_to(self._port) - before
        return _Connection(store, ours, not self._port)


class _Connection:
    """A store as PyTorch's, but that every call raises ConnectionAbortedError once the other end is gone."""

    def __init__(self, store: Any, sockets: set[int], may_be_file: bool) -> None:
        self._store = store
        self._poll = select.poll()
        self._may_be_file = may_be_file
        for descriptor in sockets:
            self._poll.register(descriptor, select.POLLRDHUP)

    def __getattr__(self, name: str) -> Any:
        if any(event & select.POLLRDHUP for _, event in self._poll.poll(0)):
            raise ConnectionAbortedError("the job's store is gone")
        return getattr(self._store, name)

    def add(self, key: str, n: int) -> int:
        """As PyTorch's. A store in a file grows with each call, also by 0, which is how a counter is asked for."""
        if n == 0 and self._may_be_file:
            is_there = self.check([key])
            return int(self.get(key)) if is_there else 0
        add = self.__getattr__("add")
        return int(add(key, n))


def _sockets_to(port: int) -> set[int]:
    """Descriptors of this process's connections to ``port`` on any host: PyTorch's client does not tell its own."""
    names, folder = set[str](), "/proc/self/fd"
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]  # 2: the other end, 9: the socket's inode
            names |= {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    return {
        int(n) for n in os.listdir(folder) if os.path.basename(os.path.realpath(f"{folder}/{n}")) in names
    }


def _takes_connections(host: str, port: int) -> None:
    """Raises OSError where no connection to the job's store is to be had, a ConnectionError if it is the store's fault.

    PyTorch's own client would try again for half an hour, and warn each time: this process, or the store's, may be out
    of file descriptors.
    """
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        connection.settimeout(_SILENT_S)
        with contextlib.suppress(TimeoutError):  # it waits for our first word, as it should
            connection.recv(1)
            raise ConnectionAbortedError("the job's store takes no more connections")
