"""Free ports to listen on later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 20_000
_TRIES = 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()
_random = random.SystemRandom()


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now, and that this process was not given before.

    Where there is room, below the ports that the kernel gives to whoever asks for any, such as the next
    client: one of those may be gone by the time that a server is up to take it.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    below = _lowest_ephemeral()
    for _ in range(_TRIES if below > _LOWEST else 0):
        port = _random.randrange(_LOWEST, below)
        if port not in _given and _is_free(host, port):
            _given.add(port)
            return port
    while True:
        port = _any_free(host)
        if port not in _given:
            _given.add(port)
            return port


def _lowest_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _is_free(host: str, port: int) -> bool:
    with _probe(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _any_free(host: str) -> int:
    with _probe(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _probe(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
