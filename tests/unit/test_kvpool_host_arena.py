"""What an agent does in an arena when something is in its way there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_kvagent import DIGEST, arena_in, block, names, ready_numbers
from helpers_kvpool import key

from workers.kvpool import host_arena
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.errors import ArenaBusy, ArenaClosedError, ArenaMissingError
from workers.kvpool.host_arenas import HostArenas


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with arena_in(tmp_path, slots=8, blocks=[0, 1]) as made:
        yield made


@pytest.fixture
def arenas(arena: Arena) -> Iterator[HostArenas]:
    opened = HostArenas(arena.path.parent, Timing(lookup_s=0.01, other_s=0.01))
    yield opened
    opened.close()


def test_a_write_that_fails_frees_its_slots(
    arena: Arena, arenas: HostArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: memoryview, part: object) -> None:
        raise MemoryError

    monkeypatch.setattr(host_arena, "_fill", fail)
    with pytest.raises(MemoryError):
        arenas.get(DIGEST).write([block(5, 0), block(6, 1)], names([5, 6]))
    assert arena.usage().writing == 0
    assert list(ready_numbers(arena, range(8))) == [0, 1]


def test_blocks_that_are_there_already_count_as_brought(arenas: HostArenas) -> None:
    written = arenas.get(DIGEST).write([block(0, 0), block(5, 1)], names([0, 5]))
    assert written.there == dict(zip(names([0, 5]), [key(0), key(5)], strict=True))
    assert written.false == 0


def test_while_an_arena_is_busy_what_was_known_holds_and_nothing_is_read_or_written(
    arena: Arena, arenas: HostArenas
) -> None:
    host = arenas.get(DIGEST)
    assert host.missing(names(range(3))) == names([2])
    with arena._guard.entered(1.0):
        assert host.missing(names(range(3))) == names([2])
        assert host.prefix(names(range(3))) == [key(0), key(1)]
        with pytest.raises(ArenaBusy):
            host.read([key(0)], 0)
        with pytest.raises(ArenaBusy):
            host.write([block(5, 0)], names([5]))
        arenas.follow()
    assert [found.position for found in host.read([key(0), key(1), key(2)], 7)] == [7, 8]
    assert arena.usage().leased == 0
    assert not host.lost


def test_an_arena_that_was_closed_under_an_agent_is_opened_anew(arenas: HostArenas) -> None:
    host = arenas.get(DIGEST)
    host.close()
    with pytest.raises(ArenaClosedError):
        host.follow()
    assert arenas.get(DIGEST) is not host
    assert arenas.get(DIGEST).missing(names([0])) == []


def test_a_folder_is_looked_through_for_what_can_be_opened(arena: Arena, arenas: HostArenas) -> None:
    folder = arena.path.parent
    (folder / f"{'0' * 32}.arena").touch()  # half made
    (folder / "stray.arena").write_text("of somebody else")
    assert list(arenas.all()) == [DIGEST]
    with pytest.raises(ArenaMissingError):
        arenas.get("0" * 32)
    arena.path.unlink()
    assert arenas.all() == {}
