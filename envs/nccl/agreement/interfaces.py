"""On which address other nodes can reach this rank.

The job says so where it must: GLOO_SOCKET_IFNAME (names) or NCCL_SOCKET_IFNAME (prefixes; ``=`` exact, ``^`` all but
these). Where it says nothing every address of this host is offered, the one that faces the job's store first: a host
name is never looked up, since many hosts' own files give 127.0.1.1 for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFADDR = 0x8915


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of this host: IPv4, then global IPv6; loopback first, as the system lists them."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                raw = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(raw[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope in ("00", "10"):  # global, or this host's own
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def named(interfaces: list[tuple[str, str]], env: Mapping[str, str]) -> list[str] | None:
    """Addresses of the interfaces that the job's environment names; None if it names none.

    Raises OSError when it names some and no interface of this host is among them.
    """
    if gloo := env.get("GLOO_SOCKET_IFNAME"):
        wanted = [name.strip() for name in gloo.split(",")]
        chosen = [address for name in wanted for has, address in interfaces if has == name]
        said = f"GLOO_SOCKET_IFNAME={gloo}"
    elif nccl := env.get("NCCL_SOCKET_IFNAME"):
        chosen = [address for name, address in interfaces if _matches(name, nccl)]
        said = f"NCCL_SOCKET_IFNAME={nccl}"
    else:
        return None
    if not chosen:
        raise OSError(f"no interface of this host is one of {said}")
    return chosen


def _matches(name: str, spec: str) -> bool:
    """NCCL's syntax."""
    but = spec.startswith("^")
    spec = spec.removeprefix("^")
    exact = spec.startswith("=")
    parts = [part.strip().partition(":")[0] for part in spec.removeprefix("=").split(",")]
    found = any(name == part if exact else name.startswith(part) for part in parts if part)
    return found != but


def reachable(store_host: str, env: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """(address to listen on, "" for all; addresses to offer, best first). Raises OSError as :func:`named`."""
    interfaces = addresses()
    if (chosen := named(interfaces, env)) is not None:
        return chosen[0], chosen[:1]
    apart = [address for _, address in interfaces if not _is_loopback(address)]
    facing = _facing(store_host)
    first = [facing] if facing in apart else []
    return "", first + [address for address in apart if address != facing]


def _facing(host: str) -> str:
    """The address from which this host would speak to ``host``; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as s:
                s.connect(address)
                return str(s.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def this_host() -> str:
    """Equal for two processes that reach each other over the loopback interface: boot and network namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
