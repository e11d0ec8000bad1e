"""A replica finds the arena of its own EngineCore, whoever else left one there, and reads what it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers_kvpool import PATIENT, another, header, key, keys, make, store

from workers.kvpool import arena_tail
from workers.kvpool.arena import Arena
from workers.kvpool.arena_tail import OWNER_CHECK_S, ArenaTail, find
from workers.kvpool.errors import ArenaBusy, ArenaMissingError, NotAttachedError
from workers.kvpool.file import MUTEX_BYTE
from workers.kvpool.locks import ByteLocks
from workers.kvpool.owners import OwnerKind

SELF = os.getpid()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", PATIENT)


def extras(names: list[bytes]) -> set[int]:
    """The router's keys under which `helpers_kvpool.store` stores them."""
    return {int.from_bytes(name[:8], "little") for name in names}


def found(folder: Path, pid: int = SELF) -> ArenaTail:
    tail = find(folder, pid)
    assert tail is not None
    return tail


def test_the_arena_of_the_engine_is_found_among_others(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 4)
    neighbour = Arena.create(tmp_path / "bb.arena", header(4), PATIENT)  # nobody owns it
    (tmp_path / "cc.arena").write_bytes(b"")  # half made
    (tmp_path / "dd.arena").write_bytes(b"x" * 10_000)  # another version's
    tail = found(tmp_path)
    assert (tail.arena.path.name, tail.namespace) == ("aa.arena", "aa")
    assert find(tmp_path, SELF + 1) is None
    assert find(tmp_path / "nowhere", SELF) is None
    for opened in (tail, engine, neighbour):
        opened.close()


def test_an_agent_of_the_same_pid_is_no_engine(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "aa.arena", header(4), PATIENT)
    arena.attach(OwnerKind.AGENT)
    assert find(tmp_path, SELF) is None


def test_a_dead_owner_of_the_same_pid_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    dead = make(tmp_path / "aa.arena", 4)
    dead._file.locks.close()  # as the kernel does when a process ends, whatever its entry says
    assert find(tmp_path, SELF) is None


def test_two_owners_of_one_pid_in_two_arenas_are_told_apart_by_nobody(tmp_path: Path) -> None:
    first, second = make(tmp_path / "aa.arena", 4), make(tmp_path / "bb.arena", 4)
    assert find(tmp_path, SELF) is None
    second.close()
    assert found(tmp_path).arena.path == first.path


def test_an_arena_that_does_not_answer_may_be_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_tail, "TIMING", arena_tail.Timing(0.0, 0.0))
    arena = make(tmp_path / "aa.arena", 4)
    locks = ByteLocks(str(arena.path))
    assert locks.take(MUTEX_BYTE)
    with pytest.raises(ArenaBusy):
        find(tmp_path, SELF)
    locks.close()


def test_equal_names_mean_the_same_file_and_no_other(tmp_path: Path) -> None:
    arena = make(tmp_path / "aa.arena", 4)
    one, two = found(tmp_path), found(tmp_path)
    assert one.name == two.name
    arena.path.unlink()
    arena.close()
    (tmp_path / "other").mkdir()
    successor = make(tmp_path / "other" / "aa.arena", 4)
    assert found(tmp_path / "other").name != one.name
    successor.close()


def test_the_first_look_tells_all_and_the_next_what_has_changed(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 3)
    store(engine, keys([1, 2]))
    tail = found(tmp_path)
    assert (set(tail.read().stored), tail.read()) == (extras(keys([1, 2])), ([], []))
    store(another(engine), keys([3, 4]))  # a neighbour; the fourth evicts the oldest
    change = tail.read()
    assert set(change.stored) == extras(keys([3, 4]))
    assert len(change.removed) == 1


def test_a_follower_that_was_left_behind_starts_over(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 8, changes=4)
    store(engine, keys([1, 2]))
    tail = found(tmp_path)
    tail.read()
    store(engine, keys(range(3, 9)))  # more than the ring remembers
    store(engine, [key(9)])  # which evicts one
    change = tail.read()
    truth = set(engine.snapshot().extras)
    assert (extras(keys([1, 2])) | set(change.stored)) - set(change.removed) == truth


def test_told_to_start_over_it_tells_all_again(tmp_path: Path) -> None:
    engine = make(tmp_path / "aa.arena", 3)
    store(engine, keys([1, 2]))
    tail = found(tmp_path)
    tail.read()
    tail.start_over()
    assert set(tail.read().stored) == extras(keys([1, 2]))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_removed_is_missed(tmp_path: Path, replaced: bool) -> None:
    engine = make(tmp_path / "aa.arena", 3)
    tail = found(tmp_path)
    engine.path.unlink()
    successor = make(engine.path, 3) if replaced else None
    with pytest.raises(ArenaMissingError, match="removed"):
        tail.read()
    if successor is not None:
        successor.close()


def test_an_engine_that_has_lost_its_arena_is_missed_at_the_next_check(tmp_path: Path) -> None:
    engine, now = make(tmp_path / "aa.arena", 3), [0.0]
    made = found(tmp_path)
    tail = ArenaTail(made.arena, SELF, made._identity, lambda: now[0])
    engine.close()
    tail.read()
    now[0] += OWNER_CHECK_S
    with pytest.raises(NotAttachedError, match=str(SELF)):
        tail.read()
