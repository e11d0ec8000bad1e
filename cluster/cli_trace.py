"""`kvorum trace`."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.failures import BadInput, RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from telemetry.record import StoredSpan, TraceSummary
    from telemetry.store import SpanStore

_SPANS_UNDER_WAY_S = 1.5
_LINKED_TRACES = 16
_RECENT = 2000
"""Traces that a prefix is looked for in; those of engine steps count as well."""
_SLOWEST_OF = 1000
"""Requests among which --slow finds the slowest."""


@click.command()
@click.argument("trace_id", required=False)
@click.option("--last", is_flag=True, help="the latest request; also what no argument means")
@click.option("--slow", is_flag=True, help=f"the slowest of the last {_SLOWEST_OF} requests")
@click.option("--errors", is_flag=True, help="of requests that failed or were cancelled")
@click.option("--tenant", help="of requests of this tenant")
@click.option("--list", "as_list", is_flag=True, help="several of them, one a line")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="how many --list shows"
)
@click.option("--store", type=click.Path(path_type=Path), help="span store to read instead of this machine's")
def trace(
    *, trace_id: str | None, last: bool, slow: bool, errors: bool, tenant: str | None, as_list: bool,
    limit: int, store: Path | None,
) -> None:  # fmt: skip
    """Show one request as a tree of spans: router, replica, queue, prefill, decode.

    Below the prefill come the engine steps it took on each shard, where they were recorded
    (--step-ratio of `kvorum up`).

    TRACE_ID is what `generate`, `chat` and `demo` print: 32 hex digits, or the first few.

    \b
    Examples:
      kvorum trace
      kvorum trace 4bf92f35
      kvorum trace --list
      kvorum trace --slow
      kvorum trace --errors --tenant acme --list
    """
    from cluster.display import make_console
    from telemetry.config import TelemetryConfig
    from telemetry.recovery import settle
    from telemetry.store import SpanStore
    from telemetry.store_file import StoreError
    from telemetry.tree import render, render_text, with_linked

    if trace_id and (last or slow or errors or tenant is not None or as_list):
        raise BadInput("a trace id goes with none of --last, --slow, --errors, --tenant and --list")
    if last and slow:
        raise BadInput("--last and --slow exclude each other: give one")
    path = store or _known_store()
    console = make_console()
    settle(TelemetryConfig(store_path=path))
    spans_of = SpanStore(path)
    try:
        if trace_id:
            chosen = _one(trace_id, spans_of)
        else:
            found = _requests(spans_of, limit if as_list else 1, slow=slow, failed=errors, tenant=tenant)
            if as_list:
                _show_list(console, found, path)
                return
            chosen = _first(found, path, filtered=errors or tenant is not None)
        spans = _whole(spans_of, chosen)
        linked = dict.fromkeys(link.trace_id for span in spans for link in span.links)
        spans = with_linked(spans, map(spans_of.trace, list(linked)[:_LINKED_TRACES]))
    except StoreError as error:
        raise RunFailed(str(error)) from None
    finally:
        spans_of.close()
    if not spans:
        raise BadInput(f"no trace {chosen} in {path}: `kvorum trace --list` shows what is there")
    if console.is_terminal:
        console.print(render(spans))
    else:
        click.echo(render_text(spans))


def _show_list(console: Console, recent: list[TraceSummary], path: Path) -> None:
    for summary in recent:
        begun = datetime.datetime.fromtimestamp(summary.start_ns / 1e9).astimezone()
        failed = f"  {summary.errors} failed" if summary.errors else ""
        console.print(
            f"{summary.trace_id}  {begun:%H:%M:%S}  {summary.duration_ns / 1e6:9.1f} ms  "
            f"{summary.spans:3} spans  {summary.root}{failed}",
            markup=False,
        )
    if not recent:
        console.print(f"no traces in {path} yet")


def _first(found: list[TraceSummary], path: Path, *, filtered: bool) -> str:
    if not found and filtered:
        raise BadInput(f"no such request in {path}: `kvorum trace --list` shows what is there")
    if not found:
        raise BadInput(f'no traces in {path} yet: send a request first, `kvorum generate "Hello"`')
    return found[0].trace_id


def _requests(
    store: SpanStore, count: int, *, slow: bool, failed: bool, tenant: str | None
) -> list[TraceSummary]:
    """The latest requests, or the slowest of many; not engine steps, which are shown with their request."""
    from telemetry.record import summarise
    from telemetry.store_format import RequestQuery

    query = RequestQuery(tenant=tenant, failed=failed, limit=_SLOWEST_OF if slow else count)
    traces = ((row.trace_id, store.trace(row.trace_id)) for row in store.requests(query))
    found = [summarise(trace_id, spans) for trace_id, spans in traces if spans]
    return sorted(found, key=lambda one: -one.duration_ns)[:count] if slow else found


def _whole(store: SpanStore, trace_id: str) -> list[StoredSpan]:
    """The trace's spans; of one that ended just now, the router's own may still be under way."""
    from telemetry.spans import ENGINE_STEP, ROUTER_REQUEST

    deadline = time.monotonic() + _SPANS_UNDER_WAY_S
    while True:
        found = store.trace(trace_id)
        if any(span.name in (ROUTER_REQUEST, ENGINE_STEP) for span in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _known_store() -> Path:
    """The store of the cluster that is up, else the one beside the state files, where all go by default."""
    from cluster import state as states

    names = states.names()
    state = states.read("kvorum" if "kvorum" in names else names[0]) if names else None
    return (state.span_store if state else None) or states.state_dir() / "traces.db"


def _one(prefix: str, store: SpanStore) -> str:
    """The trace meant: a request's, else one of engine steps, which may be looked at, too."""
    from telemetry.spans import ENGINE_STEP

    text = prefix.lower()
    if len(text) == 32:
        return text
    known = [summary for summary in store.recent(_RECENT) if summary.trace_id.startswith(text)]
    requests = [summary for summary in known if summary.root != ENGINE_STEP]
    found = [summary.trace_id for summary in requests or known]
    if len(found) != 1:
        raise BadInput(
            f"{len(found) or 'no'} recent traces begin with {prefix!r}: "
            + ("give more digits" if found else "`kvorum trace --list` shows what is there")
        )
    return found[0]
