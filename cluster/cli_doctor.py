"""`kvorum doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.failures import RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.evidence import Evidence, Metrics, ReplicaFacts, RequestRecord, StepRecord
    from cluster.finding import Finding
    from cluster.state import ClusterState
    from telemetry.store import SpanStore

_STEP_TRACES = 64


@click.command()
@click.option("--name", help="which cluster; needed only when several are up")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=15.0,
    show_default=True,
    help="look at requests that began so recently",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 5000),
    default=500,
    show_default=True,
    help="of them, at so many: the latest",
)
@click.option("--store", type=click.Path(path_type=Path), help="span store to read instead of this machine's")
@click.option("--json", "as_json", is_flag=True, help="findings and the figures of the requests, as JSON")
def doctor(name: str | None, minutes: float, limit: int, store: Path | None, as_json: bool) -> None:
    """Name what slows a cluster down, with figures, the setting to change and what to expect of it.

    Reads the traces of recent requests, what replicas say of themselves, and the viewer's metrics. High TTFT
    comes of queues, prefill, or prompts computed where they are not cached; high TPOT of the batch, the
    KV cache's bandwidth, other requests' prefills, or shards that wait for each other; low throughput of
    limits on the batch or of KV space. Costliest first.

    \b
    Examples:
      kvorum doctor
      kvorum doctor --minutes 5
      kvorum doctor --json | jq '.findings[0].cause'
    """
    from cluster import state as states
    from cluster.diagnosis import diagnose
    from cluster.display import make_console
    from cluster.evidence import Evidence
    from telemetry.store import SpanStore
    from telemetry.store_file import StoreError

    state = states.find(name)
    replicas, problem = _replicas(state)
    path = store or state.span_store or states.state_dir() / "traces.db"
    since_s = max(time.time() - minutes * 60, state.created)  # what ran before had other settings
    try:
        requests, steps = _traces(SpanStore(path), since_s, limit)
    except StoreError as error:
        raise RunFailed(str(error)) from None
    evidence = Evidence(requests, replicas, steps, _metrics(state))
    findings = diagnose(evidence)
    if as_json:
        content = {"summary": summary(evidence), "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(content, indent=2))
        return
    console = make_console()
    if problem:
        console.print(f"[yellow]{problem}[/]")
    _show(console, evidence, findings, minutes)


def summary(evidence: Evidence) -> dict[str, float]:
    """Figures of the requests that were served: counts, percentiles, and shares of a mean request's time."""
    import numpy as np

    served = [request for request in evidence.requests if not request.error]
    found: dict[str, float] = {
        "requests": len(evidence.requests),
        "failed": sum(request.error not in ("", "cancelled") for request in evidence.requests),
        "replicas": len(evidence.replicas),
    }
    columns = {
        "ttft_s": [request.ttft_s for request in served if request.ttft_s is not None],
        "tpot_s": [request.tpot_s for request in served if request.tpot_s is not None],
    }
    for name, values in columns.items():
        if values:
            found[f"{name}_p50"], found[f"{name}_p95"] = np.percentile(values, (50, 95)).tolist()
    total = sum(request.duration_s for request in served)
    for phase in ("held", "queue", "prefill", "decode"):
        spent = sum(getattr(request, f"{phase}_s") for request in served)
        found[f"share_{phase}"] = spent / total if total else 0.0
    return found


def _show(console: Console, evidence: Evidence, findings: Sequence[Finding], minutes: float) -> None:
    figures = summary(evidence)
    if not evidence.requests:
        console.print(f"no traced requests in the last {minutes:g} minutes: send some, then ask again")
    else:
        console.print(_heading(figures, minutes))
    for number, finding in enumerate(findings, 1):
        console.print(f"\n[bold]{number}. {finding.symptom}: {finding.cause.replace('-', ' ')}[/]")
        for label, text in (
            ("why", finding.figures),
            ("change", finding.change),
            ("effect", finding.effect),
        ):
            console.print(f"   {label:<7} {text}", markup=False)
    if evidence.requests and not findings:
        console.print("nothing stands out: no queue, no missed cache hits, no slow replica, no crowded batch")


def _heading(figures: dict[str, float], minutes: float) -> str:
    text = f"{figures['requests']:.0f} requests of the last {minutes:g} minutes"
    text += f" on {figures['replicas']:.0f} replicas, {figures['failed']:.0f} failed"
    if "ttft_s_p50" in figures:
        text += f"; TTFT {figures['ttft_s_p50']:.2f} s (p95 {figures['ttft_s_p95']:.2f})"
    if "tpot_s_p50" in figures:
        text += f", TPOT {figures['tpot_s_p50'] * 1e3:.1f} ms (p95 {figures['tpot_s_p95'] * 1e3:.1f})"
    shares = (
        ("router queue", "held"),
        ("engine queue", "queue"),
        ("prefill", "prefill"),
        ("decode", "decode"),
    )
    return f"{text}\ntime of a mean request: " + ", ".join(
        f"{label} {figures[f'share_{phase}']:.0%}" for label, phase in shares
    )


def _traces(store: SpanStore, since_s: float, limit: int) -> tuple[list[RequestRecord], list[StepRecord]]:
    """Requests that began since then, oldest first, and the recorded engine steps of some of them."""
    from cluster.evidence import read_request, read_step
    from telemetry.store_format import RequestQuery

    requests: list[RequestRecord] = []
    linked: dict[str, None] = {}
    try:
        for row in store.requests(RequestQuery(limit=limit)):
            if row.start_ns < since_s * 1e9:
                break
            spans = store.trace(row.trace_id)
            linked |= dict.fromkeys(link.trace_id for span in spans for link in span.links)
            if (request := read_request(spans)) is not None:
                requests.append(request)
        steps = [
            read_step(span) for trace_id in list(linked)[:_STEP_TRACES] for span in store.trace(trace_id)
        ]
    finally:
        store.close()
    return requests[::-1], [step for step in steps if step is not None]


def _replicas(state: ClusterState) -> tuple[list[ReplicaFacts], str]:
    """What replicas and shards say now, and why that is missing where it is."""
    from cluster.adminclient import AdminClient
    from cluster.evidence import read_replicas
    from protos.errors import KvorumError

    status = None
    try:
        with AdminClient(state.admin_address, state.token) as admin:
            status = admin.status()
            return read_replicas(status, admin.overlap()), ""
    except KvorumError as error:
        if status is not None:
            return read_replicas(status), f"shards were not asked how they communicate ({error.code.name})"
        return [], f"the controller does not answer ({error.code.name}): judging by traces alone"


def _metrics(state: ClusterState) -> Metrics:
    from cluster.evidence import Metrics, read_metrics
    from cluster.viewer_client import read_metrics as ask
    from cluster.viewer_config import viewer_key

    text = ask(state.viewer_url, viewer_key(state.token), ca=state.viewer_ca) if state.viewer_url else None
    return read_metrics(text) if text else Metrics()
