"""Making and opening arenas: geometry, headers, and every refusal with what to do."""

from __future__ import annotations

import os
import re
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_kvpool import NAMESPACE, PATIENT, RANKS, header, keys, make, store
from hypothesis import given
from hypothesis import strategies as st

from workers.kvpool.admission import Policy
from workers.kvpool.arena import Arena
from workers.kvpool.errors import (
    ArenaAccessError,
    ArenaBusy,
    ArenaMismatchError,
    ArenaMissingError,
    ArenaSpaceError,
    ArenaTooSmallError,
)
from workers.kvpool.file import CREATE_BYTE
from workers.kvpool.header import HEADER_BYTES, Header, file_name
from workers.kvpool.layout import PAGE, Geometry, Segment, Word
from workers.kvpool.locks import ByteLocks


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def poke(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(8 * word)
        file.write(value.to_bytes(8, "little"))


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 20_000))
def test_sections_are_apart_and_the_payload_is_on_pages(slots: int, ranks: int, rank_bytes: int) -> None:
    geometry = Geometry(slots, ranks, rank_bytes, changes=16)
    segment = Segment(bytearray(geometry.total_bytes), geometry)
    end = 0
    for name, section in geometry.sections.items():
        assert section.offset >= end
        array = getattr(segment, name, None)
        end = section.offset + (array.nbytes if array is not None else PAGE)
    assert end == geometry.total_bytes
    assert geometry.payload_offset % PAGE == geometry.slot_stride % PAGE == 0
    last = segment.part(slots - 1, ranks - 1)
    last[-1] = 7
    assert len(last) == rank_bytes
    assert segment.buffer[geometry.total_bytes - geometry.slot_stride + geometry.slot_bytes - 1] == 7


@given(st.integers(1, 6), st.integers(1, 50_000), st.integers(0, 3_000_000))
def test_a_budget_is_used_up_and_not_exceeded(ranks: int, rank_bytes: int, budget: int) -> None:
    needed = Geometry(1, ranks, rank_bytes, 16).total_bytes
    if budget < needed:
        with pytest.raises(ArenaTooSmallError, match=f"at least {needed} bytes, "):
            Geometry.fit(budget, ranks, rank_bytes, changes=16)
        return
    fitted = Geometry.fit(budget, ranks, rank_bytes, changes=16)
    assert fitted.total_bytes <= budget
    assert replace(fitted, slots=fitted.slots + 1).total_bytes > budget


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0), (1 << 32, 1, 1)])
def test_geometries_that_cannot_be_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"arena has 1 to|at least 1"):
        Geometry(*values)


def test_a_buffer_that_is_too_short_is_no_segment() -> None:
    geometry = Geometry(1, 1, 1)
    with pytest.raises(ValueError, match="are needed"):
        Segment(bytearray(geometry.total_bytes - 1), geometry)


def test_a_header_is_read_as_it_was_written() -> None:
    wanted = Header(Geometry(7, 3, 999, 21), {"model": "é/ü", "block_size": 16}, Policy.TINYLFU)
    assert Header.decode(wanted.encode(multiplier=3), "x") == wanted


def test_each_namespace_has_a_file_of_its_own_in_whatever_order_it_is_written() -> None:
    name = file_name({"model": "m", "block_size": 16})
    assert name == file_name({"block_size": 16, "model": "m"})
    assert re.fullmatch(r"[0-9a-f]{32}\.arena", name)
    others = [{"model": "m", "block_size": 32}, {"model": "m", "block_size": "16"}, {"model": "m"}]
    assert len({name, *map(file_name, others)}) == 4


def test_a_namespace_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 4096"):
        Arena.create(tmp_path / "a.arena", replace(header(1), namespace={"model": "m" * PAGE}))


def test_who_comes_first_makes_the_arena_whole_and_others_find_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "a.arena"
    with make(path, slots=3) as first:
        status = path.stat()
        assert status.st_size == first.header.geometry.total_bytes
        assert status.st_blocks * 512 >= status.st_size  # no holes that a full file system could not fill
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        store(first, keys([1]))
        with Arena.create(path, header(3)) as second, Arena.open(path) as third:
            assert second.lookup(keys([1])) == third.lookup(keys([1])) == first.lookup(keys([1]))
    with Arena.create(path, header(3)) as later:
        assert len(later.snapshot().keys) == 1  # it outlives those that use it


def test_all_that_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    made: list[Arena] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        made.append(Arena.create(tmp_path / "a.arena", header(50), PATIENT))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    with Arena.open(tmp_path / "a.arena", header(50)) as arena:
        assert len({int(one._segment.words[Word.MULTIPLIER]) for one in (*made, arena)}) == 1
    for one in made:
        one.close()


@pytest.mark.parametrize("left", [0, 100, 3 * HEADER_BYTES])
def test_what_a_maker_that_died_has_left_is_made_anew(tmp_path: Path, left: int) -> None:
    path = tmp_path / "a.arena"
    path.write_bytes(bytes(left))
    with pytest.raises(ArenaMissingError, match="not finished"):
        Arena.open(path)
    with make(path, slots=2) as arena:
        assert store(arena, keys([1, 2])) == keys([1, 2])
        assert arena.check() == []


def test_a_maker_that_died_before_the_magic_has_made_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    make(path, slots=2).close()
    poke(path, Word.MAGIC, 0)
    with make(path, slots=3) as arena:
        assert arena.check() == []


def test_a_maker_that_is_interrupted_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Arena.create(tmp_path / "a.arena", header(1))
    assert list(tmp_path.iterdir()) == []


def test_whoever_waits_too_long_for_the_maker_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    path.touch()
    locks = ByteLocks(str(path))
    assert locks.take(CREATE_BYTE)
    with pytest.raises(ArenaBusy, match=r"a\.arena"):
        Arena.create(path, header(1), wait_s=0.01)
    locks.close()
    Arena.create(path, header(1)).close()


def test_there_is_no_arena_to_open(tmp_path: Path) -> None:
    with pytest.raises(ArenaMissingError, match="start a replica"):
        Arena.open(tmp_path / "a.arena")


@pytest.mark.parametrize(
    ("wanted", "difference"),
    [
        (header(4), "slots 3, not 4"),
        (replace(header(3), geometry=Geometry(3, 1, 5000, 64)), f"ranks {RANKS}, not 1"),
        (header(3, changes=65), "changes 64, not 65"),
        (header(3, Policy.TINYLFU), "admission LRU, not TINYLFU"),
        (
            replace(header(3), namespace=NAMESPACE | {"revision": "b", "dtype": "x"}),
            "dtype None, not 'x', revision",
        ),
    ],
)
def test_another_arena_is_refused_with_each_difference(
    tmp_path: Path, wanted: Header, difference: str
) -> None:
    path = tmp_path / "a.arena"
    make(path, slots=3).close()
    for call in (lambda: Arena.create(path, wanted), lambda: Arena.open(path, wanted)):
        with pytest.raises(ArenaMismatchError) as refused:
            call()
        assert difference in str(refused.value)
        assert "remove the file" in str(refused.value)
    Arena.open(path, header(3)).close()


@pytest.mark.parametrize(
    ("word", "value", "match"),
    [
        (Word.MAGIC, 1, "is not an arena"),
        (Word.FORMAT, 99, "format 99 and this version of Kvorum reads"),
        (Word.SLOTS, 0, "damaged header"),
        (Word.POLICY, 9, "damaged header"),
        (Word.NAMESPACE_BYTES, 3, "damaged header"),
        (Word.SLOTS, 4, "was cut to"),
    ],
)
def test_files_that_are_no_arena_of_this_version_are_refused(
    tmp_path: Path, word: int, value: int, match: str
) -> None:
    path = tmp_path / "a.arena"
    make(path, slots=3).close()
    poke(path, word, value)
    before = path.read_bytes()
    with pytest.raises(ArenaMismatchError, match=match):
        Arena.open(path)
    with pytest.raises(ArenaMismatchError):
        Arena.create(path, header(3))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"x", b"#!/bin/sh\n" * 2000])
def test_any_other_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arena"
    path.write_bytes(content)
    with pytest.raises(ArenaMismatchError, match="is not an arena"):
        Arena.create(path, header(3))
    assert path.read_bytes() == content


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "a.arena", tmp_path / "file" / "folder" / "a.arena"):
        with pytest.raises(ArenaAccessError, match=r"cannot open an arena at .*name a folder in memory"):
            Arena.create(path, header(1))
        with pytest.raises(ArenaAccessError, match="name a folder in memory"):
            Arena.open(path)


def test_a_folder_or_a_link_in_the_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    make(tmp_path / "real", slots=1).close()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("folder", "link"):
        with pytest.raises(ArenaAccessError, match="cannot open"):
            Arena.create(tmp_path / name, header(1))


def test_another_users_arena_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.arena", slots=1).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ArenaAccessError, match="no regular file of user 4711"):
        Arena.create(tmp_path / "a.arena", header(1))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArenaAccessError, match="Permission denied"):
        Arena.create(tmp_path / "a.arena", header(1))


def test_a_file_system_without_the_space_is_an_error_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    vast = replace(header(1), geometry=Geometry(1000, 8, 1 << 40))
    with pytest.raises(
        ArenaSpaceError, match=r"an arena of 8796\d+ bytes does not fit.*No space left.*bytes are free"
    ):
        Arena.create(path, vast)
    assert not path.exists()


def test_space_that_runs_out_half_way_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with largest_file(1 << 20), pytest.raises(ArenaSpaceError, match="make the KV pool smaller"):
        Arena.create(path, header(1000))
    assert not path.exists()
    make(path, slots=2).close()


def test_whoever_waited_for_a_maker_without_space_tries_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    path.touch()
    locks = ByteLocks(str(path))
    assert locks.take(CREATE_BYTE)
    made: list[Arena] = []
    thread = threading.Thread(target=lambda: made.append(Arena.create(path, header(2), PATIENT)))
    thread.start()
    path.unlink()  # as a maker does that finds no space
    locks.close()
    thread.join()
    assert made[0].path.stat().st_size == header(2).geometry.total_bytes
    made[0].close()


def test_what_was_cut_is_refused_instead_of_crashing_its_readers(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    make(path, slots=3).close()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ArenaMismatchError, match="was cut to"):
        Arena.open(path)
