"""Load is held by leases and by nothing else."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from router.leases import Lease, LeasedLoad, LeaseTable


def taken(table: LeaseTable, key: str = "r0@e1", prefill: int = 100, decode: int = 20) -> Lease:
    return table.take(key, prefill_tokens=prefill, decode_tokens=decode, prefill_pairs=prefill * prefill / 2)


def test_lease_adds_to_its_replica_only() -> None:
    table = LeaseTable()
    taken(table)
    assert table.load("r0@e1") == LeasedLoad(1, 1, 100, 20, 5000.0)
    assert table.load("r1@e1") == LeasedLoad()


def test_lease_shrinks_as_tokens_arrive() -> None:
    table = LeaseTable()
    lease = taken(table)
    lease.generated(1)
    assert table.load("r0@e1") == LeasedLoad(1, 1, 0, 19)
    lease.generated(4)
    assert table.load("r0@e1") == LeasedLoad(1, 1, 0, 15)


def test_first_token_ends_the_pairs_of_its_own_prompt_only() -> None:
    table = LeaseTable()
    first, other = taken(table, prefill=101), taken(table, prefill=7)
    first.generated(1)
    assert table.load("r0@e1").prefill_pairs == 24.5
    other.release()
    assert table.load("r0@e1").prefill_pairs == 0
    first.release()
    assert table.held() == {}


def test_more_tokens_than_expected_do_not_make_load_negative() -> None:
    table = LeaseTable()
    other, lease = taken(table), taken(table, decode=3)
    lease.generated(50)
    assert table.load("r0@e1").decode_tokens == 20
    lease.release()
    other.release()
    assert table.held() == {}


def test_second_release_changes_nothing() -> None:
    table = LeaseTable()
    lease, other = taken(table), taken(table)
    lease.release()
    lease.release()
    assert table.load("r0@e1").requests == 1
    other.release()
    assert table.held() == {}


def test_tokens_after_release_change_nothing() -> None:
    table = LeaseTable()
    lease, _other = taken(table), taken(table)
    lease.release()
    lease.generated(5)
    assert table.load("r0@e1") == LeasedLoad(1, 1, 100, 20, 5000.0)


def test_lease_is_released_when_its_block_raises() -> None:
    table = LeaseTable()
    with pytest.raises(ZeroDivisionError), taken(table):
        raise ZeroDivisionError
    assert table.held() == {}


def test_table_is_empty_after_any_interleaving() -> None:
    rng, table = random.Random(7), LeaseTable()
    live: list[Lease] = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            lease = live.pop(rng.randrange(len(live)))
            lease.generated(rng.randrange(30))
            lease.release()
        else:
            key = f"r{rng.randrange(4)}@e1"
            u, c = rng.randrange(1_000_000), rng.randrange(1_000_000)
            pairs = u * (c + u / 2)
            lease = table.take(key, prefill_tokens=u, prefill_pairs=pairs, decode_tokens=9, sequences=2)
            live.append(lease)
            live[-1].generated(rng.randrange(3))
    assert sum(load.requests for load in table.held().values()) == len(live)
    for lease in live:
        lease.release()
    assert table.held() == {}


async def test_idle_returns_only_when_the_last_lease_of_the_replica_ends() -> None:
    table = LeaseTable()
    first, second = taken(table), taken(table)
    waiting = asyncio.ensure_future(table.idle("r0@e1"))
    first.release()
    await asyncio.sleep(0)
    assert not waiting.done()
    second.release()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(table.idle("r0@e1"), 1)


def test_sink_hears_of_every_change_but_not_of_every_token() -> None:
    heard: list[tuple[str, LeasedLoad]] = []
    table = LeaseTable(lambda key, load: heard.append((key, replace(load))))
    lease = taken(table)
    lease.generated(1)
    for _ in range(5):
        lease.generated(1)
    lease.release()
    lease.release()
    assert heard == [
        ("r0@e1", LeasedLoad(1, 1, 100, 20, 5000.0)),
        ("r0@e1", LeasedLoad(1, 1, 0, 19)),
        ("r0@e1", LeasedLoad(0, 0, 0, 0)),
    ]


def test_what_the_sink_heard_last_is_what_the_table_holds() -> None:
    heard: dict[str, LeasedLoad] = {}
    rng, live = random.Random(5), list[Lease]()
    table = LeaseTable(lambda key, load: heard.__setitem__(key, replace(load)))
    for _ in range(1000):
        if live and rng.random() < 0.5:
            lease = live.pop(rng.randrange(len(live)))
            lease.generated(rng.randrange(2))
            lease.release()
        else:
            live.append(taken(table, f"r{rng.randrange(3)}@e1", prefill=rng.randrange(99)))
        for key, told in heard.items():
            now = table.load(key)
            assert (told.requests, told.sequences) == (now.requests, now.sequences)
            assert (told.prefill_tokens, told.prefill_pairs) == (now.prefill_tokens, now.prefill_pairs)
    for lease in live:
        lease.release()
    assert all(load == LeasedLoad() for load in heard.values())
