"""Which other hosts an agent asks, and which it leaves alone for a while."""

from __future__ import annotations

import pytest

from workers.kvpool.peers import AVOIDED_S, MOST_PEERS, Peers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock: Clock) -> Peers:
    return Peers(clock)


def fail(peers: Peers, clock: Clock, agent: str = "a:1") -> None:
    peers.failed(agent, "refused", clock())


def test_a_peer_that_nobody_knows_is_asked(peers: Peers) -> None:
    assert peers.avoided("a:1") == ""
    assert peers.known() == []


def test_a_peer_that_fails_is_left_alone_ever_longer(peers: Peers, clock: Clock) -> None:
    for wait_s in (*AVOIDED_S, AVOIDED_S[-1]):
        fail(peers, clock)
        assert peers.avoided("a:1") == f"a:1 is not asked for {wait_s:.1f} s: refused"
        assert peers.avoided("b:1") == ""
        clock.now += wait_s - 0.01
        assert peers.avoided("a:1") != ""
        clock.now += 0.02
        assert peers.avoided("a:1") == ""


def test_one_success_and_all_is_forgiven(peers: Peers, clock: Clock) -> None:
    for _ in range(4):
        fail(peers, clock)
        clock.now += 60
    fail(peers, clock)
    peers.served("a:1", 2, 2000, 1.0)
    assert peers.avoided("a:1") == ""
    clock.now += 1
    fail(peers, clock)
    assert "for 1.0 s" in peers.avoided("a:1")


def test_transfers_that_fail_side_by_side_count_once(peers: Peers, clock: Clock) -> None:
    began = clock()
    clock.now += 2
    for _ in range(5):
        peers.failed("a:1", "stalled", began)
    assert "for 1.0 s" in peers.avoided("a:1")
    clock.now += 2
    fail(peers, clock)
    assert "for 2.0 s" in peers.avoided("a:1")


def test_speed_is_that_of_recent_transfers(peers: Peers) -> None:
    peers.served("a:1", 10, 1000, 1.0)
    ((agent, first, avoided_s),) = peers.known()
    assert (agent, first.blocks, first.bytes_per_s, avoided_s) == ("a:1", 10, 1000.0, 0.0)
    for _ in range(30):
        peers.served("a:1", 1, 100, 1.0)
    ((_, peer, _),) = peers.known()
    assert peer.blocks == 40
    assert 100 <= peer.bytes_per_s < 101


def test_only_so_many_are_remembered_and_those_asked_last(peers: Peers, clock: Clock) -> None:
    fail(peers, clock, "kept:1")
    for port in range(2 * MOST_PEERS):
        fail(peers, clock, f"a:{port}")
        clock.now += 0.001
        fail(peers, clock, "kept:1")
    known = [agent for agent, _, _ in peers.known()]
    assert len(known) == MOST_PEERS
    assert "kept:1" in known
    assert f"a:{2 * MOST_PEERS - 1}" in known
    assert "a:0" not in known
