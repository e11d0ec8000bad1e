"""`kvorum trace` on a store with requests and with the engine steps they link to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import main
from telemetry import spans
from telemetry.record import StoredLink, StoredSpan
from telemetry.store import SpanStore

NOW_NS = time.time_ns()


def a_span(trace: int, own: int, parent: int | None, name: str, *, links: int | None = None) -> StoredSpan:
    return StoredSpan(
        trace_id=f"{trace:032x}",
        span_id=f"{own:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        name=name,
        kind="INTERNAL",
        start_ns=NOW_NS + own,
        end_ns=NOW_NS + own + 10**6,
        links=() if links is None else (StoredLink(f"{links:032x}", f"{1:016x}"),),
        resource={"service.name": "s"},
    )


def request_trace(trace: int, steps: int) -> list[StoredSpan]:
    return [
        a_span(trace, 11, None, spans.ROUTER_REQUEST),
        a_span(trace, 12, 11, spans.REPLICA_GENERATE),
        a_span(trace, 13, 12, spans.REPLICA_PREFILL, links=steps),
        a_span(trace, 14, 12, spans.REPLICA_DECODE),
    ]


def step_trace(trace: int) -> list[StoredSpan]:
    return [a_span(trace, 21, None, spans.ENGINE_STEP), a_span(trace, 22, 21, spans.ENGINE_STEP)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two requests; the steps of each, and of many others that were not recorded, came later."""
    path = tmp_path / "traces.db"
    store = SpanStore(path)
    for request in (request_trace(0xA1, 0xE1), request_trace(0xA2, 0xE2)):
        store.write(request)
    for steps in range(0xE1, 0xF5):
        store.write(step_trace(steps))
    store.close()
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["trace", *arguments]) == 0
    return [line.split("  s ")[0].rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_latest_trace_is_a_request_with_its_steps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--store", str(path))
    assert lines[0].startswith(f"trace {0xA2:032x}: 6 spans")
    assert lines[1:] == [
        "kvorum.router.request",
        "  kvorum.replica.generate",
        "    kvorum.replica.prefill",
        "      kvorum.engine.step",
        "        kvorum.engine.step",
        "    kvorum.replica.decode",
    ]


def test_the_list_shows_requests_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--list", "--store", str(path))
    assert [line.split()[0] for line in lines] == [f"{0xA2:032x}", f"{0xA1:032x}"]
    assert len(shown(capsys, "--list", "--limit", "1", "--store", str(path))) == 1


def test_engine_steps_can_be_looked_at_by_their_trace_id(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, f"{0xE1:032x}", "--store", str(path))
    assert lines[1:] == ["kvorum.engine.step", "  kvorum.engine.step"]


def test_a_prefix_means_a_request_where_one_begins_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shift = 4 * 30
    request, steps, others = (digits << shift for digits in (0xA1, 0xA2, 0xE1))
    store = SpanStore(tmp_path / "traces.db")
    for spans_of_one in (request_trace(request, steps), step_trace(steps), step_trace(others)):
        store.write(spans_of_one)
    store.close()
    at = ("--store", str(tmp_path / "traces.db"))
    assert shown(capsys, "a", *at)[1] == "kvorum.router.request"
    assert shown(capsys, "a2", *at)[1] == "kvorum.engine.step"
    assert shown(capsys, "e", *at)[1] == "kvorum.engine.step"


def test_steps_that_were_not_recorded_are_named_by_their_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write(request_trace(0xA1, 0xE1))
    store.close()
    assert main(["trace", "--store", str(tmp_path / "traces.db")]) == 0
    out = capsys.readouterr().out
    assert spans.ENGINE_STEP not in out
    assert f"-> trace {0xE1:032x}" in out


def test_a_store_of_engine_steps_alone_has_no_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SpanStore(tmp_path / "traces.db")
    store.write(step_trace(0xE1))
    store.close()
    assert main(["trace", "--store", str(tmp_path / "traces.db")]) == 2
    assert "no traces in" in capsys.readouterr().err


@pytest.fixture
def tenants(tmp_path: Path) -> list[str]:
    """A quick request of one tenant, a slow and a failed one of another; the arguments to see them."""
    store = SpanStore(tmp_path / "traces.db")
    for trace, tenant, lasts_ns, error in ((1, "a", 10**6, ""), (2, "b", 10**9, ""), (3, "b", 10**7, "LOST")):
        attributes = {spans.TENANT: tenant} | ({spans.ERROR_TYPE: error} if error else {})
        request = a_span(trace, trace, None, spans.ROUTER_REQUEST)
        status = "ERROR" if error else "UNSET"
        store.write(
            [replace(request, end_ns=request.start_ns + lasts_ns, attributes=attributes, status=status)]
        )
    store.close()
    return ["--store", str(tmp_path / "traces.db")]


@pytest.mark.parametrize(
    ("asked", "traces"),
    [
        ([], [3, 2, 1]),
        (["--slow"], [2, 3, 1]),
        (["--errors"], [3]),
        (["--tenant", "b"], [3, 2]),
        (["--tenant", "b", "--slow"], [2, 3]),
        (["--tenant", "a", "--errors"], []),
    ],
)
def test_requests_are_chosen_by_tenant_error_and_duration(
    tenants: list[str], asked: list[str], traces: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [line.split()[0] for line in shown(capsys, "--list", *asked, *tenants)]
    assert listed == ([f"{trace:032x}" for trace in traces] or ["no"])
    if traces:
        assert shown(capsys, *asked, *tenants)[0].startswith(f"trace {traces[0]:032x}")


def test_a_choice_without_a_request_says_so(tenants: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--tenant", "nobody", *tenants]) == 2
    assert "no such request" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--slow"], ["--errors"], ["--tenant", "a"], ["--last"], ["--list"]])
def test_a_trace_id_leaves_nothing_to_choose(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ab12", *more]) == 2
    assert "a trace id goes with none of" in capsys.readouterr().err
