"""What the viewer asks of the span store: lists of requests by filter and page, services, searches."""

import multiprocessing
import sqlite3
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from helpers_viewer import MS, a_request, a_span

from telemetry import spans
from telemetry.store import RequestQuery, SpanQuery, SpanStore, StoreError


@pytest.fixture
def store(tmp_path: Path) -> SpanStore:
    return SpanStore(tmp_path / "traces.db")


def ids(store: SpanStore, **query: object) -> list[int]:
    return [int(row.trace_id, 16) for row in store.requests(RequestQuery(**query))]  # type: ignore[arg-type]


def test_requests_are_listed_by_start_latest_first_however_they_were_written(store: SpanStore) -> None:
    for trace, second in ((1, 30), (2, 10), (3, 20)):
        store.write(a_request(trace, base_ns=second * 10**9))
    assert ids(store) == [1, 3, 2]
    assert ids(store, limit=2) == [1, 3]


def test_each_filter_finds_its_requests_and_they_combine(store: SpanStore) -> None:
    store.write(a_request(1, tenant="acme", replica="replica-0"))
    store.write(a_request(2, tenant="acme", replica="replica-1", ms=900))
    store.write(a_request(3, tenant="o'; DROP TABLE spans; --", error="REPLICA_LOST"))
    assert set(ids(store, tenant="acme")) == {1, 2}
    assert ids(store, tenant="o'; DROP TABLE spans; --") == [3]
    assert ids(store, replica="replica-1") == [2]
    assert ids(store, failed=True) == [3]
    assert ids(store, slow_ns=500 * MS) == [2]
    assert ids(store, tenant="acme", replica="replica-0", failed=True) == []
    assert ids(store, tenant="\ud800") == []


def test_a_retried_attempt_does_not_make_its_request_a_failed_one(store: SpanStore) -> None:
    request = a_request(1)
    attempt = a_span(
        spans.ROUTER_FORWARD, 6, 9, parent=request[1], error="REPLICA_LOST", kvorum__replica="replica-7"
    )
    store.write([*request, attempt])
    assert ids(store, failed=True) == []
    assert ids(store, replica="replica-7") == [1], "but it is found by the replica that it was tried on"


def test_pages_follow_on_from_each_other_even_where_requests_began_together(store: SpanStore) -> None:
    for trace in range(1, 8):
        store.write(a_request(trace, base_ns=10**18))
    seen: list[int] = []
    before = None
    while page := store.requests(RequestQuery(limit=3, before=before)):
        seen += [int(row.trace_id, 16) for row in page]
        before = page[-1]
    assert sorted(seen) == list(range(1, 8))


def test_traces_of_engine_steps_are_no_requests_and_those_of_lost_routers_are(store: SpanStore) -> None:
    store.write([a_span(spans.ENGINE_STEP, 0, 1, trace=1)])
    store.write([a_span(spans.REPLICA_GENERATE, 0, 1, trace=2, parent="ab" * 8)])
    store.write([a_span("an app's own", 0, 1, trace=3)])
    assert set(ids(store)) == {2, 3}


def test_a_huge_trace_is_cut_but_its_requests_spans_are_not(store: SpanStore) -> None:
    noise = [a_span("noise", at, at + 1, parent="ab" * 8) for at in range(300)]
    store.write([*noise, *a_request(1)])
    cut = store.trace(f"{1:032x}", 50)
    assert {spans.HTTP_REQUEST, spans.ROUTER_REQUEST, spans.REPLICA_GENERATE} <= {span.name for span in cut}
    assert len(cut) == 50
    assert store.size(f"{1:032x}") == 306


def test_services_and_their_operations_are_listed(store: SpanStore) -> None:
    store.write(a_request(1))
    assert store.services() == ["kvorum.http", "kvorum.replica", "kvorum.router"]
    names = [name for name, _ in store.operations("kvorum.router")]
    assert names == sorted({spans.ROUTER_FORWARD, spans.ROUTER_REQUEST, spans.ROUTER_ROUTE})
    assert store.operations("nobody") == []
    assert store.services(2) == ["kvorum.http", "kvorum.replica"]


def test_a_search_wants_all_conditions_of_one_span(store: SpanStore) -> None:
    base = 10**18
    store.write(a_request(1, base_ns=base))
    store.write(a_request(2, base_ns=base + 1000 * MS, ms=900, error="OVERLOADED"))
    found = lambda **query: [int(one, 16) for one in store.search(SpanQuery("kvorum.router", **query))]  # noqa: E731
    assert found() == [2, 1]
    assert found(operation=spans.ROUTER_ROUTE, least_ns=100 * MS) == []
    assert found(least_ns=500 * MS) == [2]
    assert found(until_ns=base + 500 * MS) == [1]
    assert found(failed=True) == [2]
    assert found(limit=1) == [2]


def test_spans_dated_far_ahead_do_not_keep_older_ones_alive(tmp_path: Path) -> None:
    now_ns = 10**18
    store = SpanStore(tmp_path / "traces.db", max_age_s=100, clock_ns=lambda: now_ns)
    store.write([a_span("ahead", 0, 1, trace=1, base_ns=2 * 10**18), a_span("old", 0, 1, trace=2)])
    now_ns += 200 * 10**9
    store.write([a_span("new", 0, 1, trace=3)])
    assert ids(store) == [3]


def old_store(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE spans (trace_id TEXT, span_id TEXT)")
        connection.execute("INSERT INTO spans VALUES ('x', 'y')")
        connection.execute("PRAGMA user_version = 1")


def test_a_store_of_the_format_before_is_emptied_by_a_writer_and_left_alone_by_a_reader(
    tmp_path: Path,
) -> None:
    path = tmp_path / "traces.db"
    old_store(path)
    with pytest.raises(StoreError, match="format 1 of an earlier version"):
        SpanStore(path).requests(RequestQuery())
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM spans").fetchone() == (1,)
    SpanStore(path).write(a_request(1))
    assert ids(SpanStore(path)) == [1]


def write_one(path: Path, trace: int, all_here: Barrier) -> None:
    all_here.wait(60)
    SpanStore(path).write(a_request(trace))


def test_processes_that_meet_an_old_store_at_once_replace_it_once(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    old_store(path)
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit locks of this process's threads
    all_here = spawn.Barrier(6)
    writers = [spawn.Process(target=write_one, args=(path, trace, all_here)) for trace in range(1, 7)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 6
    assert set(ids(SpanStore(path))) == set(range(1, 7)), "nobody emptied what another had written"


def test_a_twin_reads_while_its_sibling_is_in_a_transaction(store: SpanStore) -> None:
    store.write(a_request(1))
    twin = store.twin()
    with sqlite3.connect(store.path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM spans")
        assert ids(twin) == [1]
        writer.execute("ROLLBACK")


def test_times_that_sqlite_cannot_hold_are_a_store_error_and_cost_only_their_batch(store: SpanStore) -> None:
    with pytest.raises(StoreError):
        store.write([replace(a_span("x", 0, 1), end_ns=1 << 64)])
    store.write(a_request(2))
    assert ids(store) == [2]
