"""Ports chosen for servers that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import ports

HOST = "127.0.0.1"


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = iter([21_001, 21_001, 21_002])
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports._random, "randrange", lambda *_: next(offered), raising=False)
    assert [ports.free_port(HOST), ports.free_port(HOST)] == [21_001, 21_002]


def test_a_port_that_somebody_listens_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        offered = iter([taken, taken, 21_003])
        monkeypatch.setattr(ports._random, "randrange", lambda *_: next(offered), raising=False)
        assert ports.free_port(HOST) == 21_003


def test_ports_lie_below_those_that_any_client_may_be_given() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [ports.free_port(HOST) for _ in range(20)]
    assert len(set(found)) == 20
    if lowest > 20_000:
        assert all(20_000 <= port < lowest for port in found)


def test_without_room_below_any_free_port_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_lowest_ephemeral", lambda: 1024)
    offered = iter([30_001, 30_001, 30_002])
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "_any_free", lambda _host: next(offered))
    assert [ports.free_port(HOST), ports.free_port(HOST)] == [30_001, 30_002]


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
