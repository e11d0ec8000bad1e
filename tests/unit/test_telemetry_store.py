"""The local span store: shared by processes, bounded, and harmless when the disk is not."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telemetry.record import StoredEvent, StoredLink, StoredSpan
from telemetry.store import SpanStore, StoreError, StoreSpanExporter

ROOT = Path(__file__).parents[2]


def a_span(number: int, trace: int = 1, *, end_ns: int | None = None, payload: str = "") -> StoredSpan:
    end_ns = time.time_ns() if end_ns is None else end_ns
    return StoredSpan(
        trace_id=f"{trace:032x}",
        span_id=f"{number:016x}",
        parent_id=None if number == 0 else f"{0:016x}",
        name=f"span {number}",
        kind="INTERNAL",
        start_ns=end_ns - 1000,
        end_ns=end_ns,
        attributes={"payload": payload},
        resource={"service.name": "kvorum.test"},
    )


def rows(store: SpanStore) -> int:
    connection = sqlite3.connect(store.path)
    try:
        return int(connection.execute("SELECT count(*) FROM spans").fetchone()[0])
    finally:
        connection.close()


def write_in_batches(path: Path, first: int, batches: int) -> None:
    store = SpanStore(path)
    for batch in range(batches):
        store.write([a_span(first + batch * 10 + at) for at in range(10)])


def test_a_span_comes_back_as_it_was_written(tmp_path: Path) -> None:
    span = StoredSpan(
        trace_id="ab" * 16,
        span_id="cd" * 8,
        parent_id="ef" * 8,
        name="näme \N{SNOWMAN}",
        kind="SERVER",
        start_ns=1_700_000_000_000_000_001,
        end_ns=time.time_ns(),
        status="ERROR",
        status_message="it broke",
        attributes={"text": "a'\"\x00\x1b", "flag": True, "count": 7, "ratio": 0.5, "list": ["x", "y"]},
        events=(StoredEvent("first", 1_700_000_000_000_000_002, {"n": 1}),),
        links=(StoredLink("12" * 16, "34" * 8, {"why": "step"}),),
        resource={"service.name": "kvorum.router", "service.instance.id": "r0"},
    )
    store = SpanStore(tmp_path / "new" / "traces.db")
    store.write([span])
    assert store.trace("AB" * 16) == [span]
    assert SpanStore(store.path).trace("ab" * 16) == [span]


def test_a_batch_that_is_written_twice_is_kept_once(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    batch = [a_span(number) for number in range(5)]
    store.write(batch)
    store.write(batch)
    assert len(store.trace(batch[0].trace_id)) == 5


def test_reading_a_store_that_does_not_exist_finds_nothing_and_creates_nothing(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    assert store.trace("0" * 32) == []
    assert store.recent() == []
    assert store.last() is None
    assert list(tmp_path.iterdir()) == []


def test_recent_lists_traces_latest_first_with_their_root_and_errors(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    for trace in (1, 2, 3):
        store.write([a_span(number, trace) for number in (1, 0, 2)])
    store.write([a_span(9, 1)])
    found = store.recent(2)
    assert [summary.trace_id for summary in found] == [f"{1:032x}", f"{3:032x}"]
    assert found[0].root == "span 0"
    assert found[0].service == "kvorum.test"
    assert (found[0].spans, found[0].errors) == (4, 0)
    assert store.last() == found[0]


def test_three_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_in_batches, args=(path, first, 20)) for first in (0, 1000, 2000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    expected = {f"{first + number:016x}" for first in (0, 1000, 2000) for number in range(200)}
    assert {span.span_id for span in SpanStore(path).trace(f"{1:032x}")} == expected


def test_a_writer_killed_in_mid_write_leaves_a_whole_store(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    code = (
        "import sys; from pathlib import Path; from test_telemetry_store import SpanStore, a_span\n"
        "store = SpanStore(Path(sys.argv[1])); number = 0\n"
        "while True:\n"
        "    store.write([a_span(number + at, payload='x' * 2000) for at in range(200)]); number += 200\n"
        "    print(number, flush=True)\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as writer:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(5)][-1]
        writer.send_signal(signal.SIGKILL)
    store = SpanStore(path)
    found = store.trace(f"{1:032x}")
    assert len(found) >= written
    assert len(found) % 200 == 0, "a batch is there as a whole or not at all"
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.write([a_span(0, trace=2)])
    assert len(store.trace(f"{2:032x}")) == 1


def test_the_newest_spans_are_kept_within_the_count(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db", max_spans=25)
    for number in range(0, 100, 10):
        store.write([a_span(number + at) for at in range(10)])
        assert rows(store) <= 25
    assert [int(span.span_id, 16) for span in store.trace(f"{1:032x}")] == list(range(75, 100))


def test_a_batch_larger_than_the_count_keeps_its_newest(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db", max_spans=3)
    store.write([a_span(number, end_ns=time.time_ns() + number) for number in range(10)])
    assert [int(span.span_id, 16) for span in store.trace(f"{1:032x}")] == [7, 8, 9]


def test_spans_beyond_the_age_are_deleted_by_the_next_write(tmp_path: Path) -> None:
    now_ns = 10_000 * 10**9
    store = SpanStore(tmp_path / "traces.db", max_age_s=100, clock_ns=lambda: now_ns)
    store.write([a_span(1, end_ns=now_ns), a_span(2, end_ns=now_ns)])
    now_ns += 60 * 10**9
    store.write([a_span(3, end_ns=now_ns)])
    assert rows(store) == 3
    now_ns += 60 * 10**9
    store.write([a_span(4, end_ns=now_ns)])
    assert [int(span.span_id, 16) for span in store.trace(f"{1:032x}")] == [3, 4]


def test_the_file_stays_within_its_bytes(tmp_path: Path) -> None:
    bound, batch_bytes = 1024 * 1024, 100 * 4000
    store = SpanStore(tmp_path / "traces.db", max_bytes=bound)
    for number in range(0, 3000, 100):
        store.write([a_span(number + at, payload="x" * 4000) for at in range(100)])
    kept = store.trace(f"{1:032x}")
    assert int(kept[-1].span_id, 16) == 2999
    assert len(kept) >= 100
    store.close()
    assert store.path.stat().st_size <= bound + 2 * batch_bytes


def test_a_deleted_file_is_made_anew(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write([a_span(1)])
    for file in tmp_path.iterdir():
        file.unlink()
    store.write([a_span(2)])
    assert [int(span.span_id, 16) for span in SpanStore(store.path).trace(f"{1:032x}")] == [2]


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write([a_span(1)])
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(StoreError, match=r"traces\.db.*not a database.*delete the file"):
        SpanStore(path).write([a_span(1)])
    with pytest.raises(StoreError):
        SpanStore(path).recent()
    assert path.read_bytes() == b"no database " * 1000


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="format 99"):
        SpanStore(path).write([a_span(1)])


def test_a_place_that_cannot_be_written_is_a_failed_export_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    exporter = StoreSpanExporter(SpanStore(tmp_path / "file" / "traces.db"))
    assert exporter.export([]).name == "FAILURE"
    assert "traces.db" in exporter.last_error


def test_a_full_disk_costs_the_batch_and_the_store_goes_on_when_there_is_room(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from test_telemetry_store import SpanStore, StoreError, a_span\n"
        "store = SpanStore(Path(sys.argv[1])); store.write([a_span(1)])\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))\n"
        "try: store.write([a_span(2 + at, payload='x' * 4000) for at in range(100)])\n"
        "except StoreError as error: print('refused')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "store.write([a_span(900)])\n"
        "print(sorted(int(span.span_id, 16) for span in store.trace(f'{1:032x}')))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, "-c", code, str(tmp_path / "traces.db")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    assert done.stdout.splitlines() == ["refused", "[1, 900]"]
