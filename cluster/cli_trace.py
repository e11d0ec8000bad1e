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


@click.command()
@click.argument("trace_id", required=False)
@click.option("--last", is_flag=True, help="the latest trace; also what no argument means")
@click.option("--list", "as_list", is_flag=True, help="the latest traces, one a line")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="how many --list shows"
)
@click.option("--store", type=click.Path(path_type=Path), help="span store to read instead of this machine's")
def trace(trace_id: str | None, last: bool, as_list: bool, limit: int, store: Path | None) -> None:
    """Show one request as a tree of spans: router, replica, queue, prefill, decode.

    Below the prefill come the engine steps it took on each shard, where they were recorded
    (--step-ratio of `kvorum up`).

    TRACE_ID is what `generate`, `chat` and `demo` print: 32 hex digits, or the first few.

    \b
    Examples:
      kvorum trace
      kvorum trace 4bf92f35
      kvorum trace --list
    """
    from cluster.display import make_console
    from telemetry.store import SpanStore, StoreError
    from telemetry.tree import render, render_text, with_linked

    if trace_id and (last or as_list):
        raise BadInput("a trace id goes with neither --last nor --list")
    path = store or _known_store()
    console = make_console()
    spans_of = SpanStore(path)
    try:
        if as_list:
            _show_list(console, _requests(spans_of, limit), path)
            return
        chosen = _one(trace_id, spans_of) if trace_id else _latest(spans_of, path)
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


def _latest(store: SpanStore, path: Path) -> str:
    found = _requests(store, 1)
    if not found:
        raise BadInput(f'no traces in {path} yet: send a request first, `kvorum generate "Hello"`')
    return found[0].trace_id


def _requests(store: SpanStore, count: int) -> list[TraceSummary]:
    """The latest traces but those of engine steps, which are shown with the request that links to them."""
    from telemetry.spans import ENGINE_STEP

    asked = 2 * count
    while True:
        found = store.recent(asked)
        kept = [summary for summary in found if summary.root != ENGINE_STEP]
        if len(kept) >= count or len(found) < asked:
            return kept[:count]
        asked *= 4


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
