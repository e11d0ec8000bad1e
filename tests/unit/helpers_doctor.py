"""Requests as a doctor sees them, of replicas with known speeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from cluster.diagnosis import diagnose
from cluster.evidence import Candidate, Evidence, ReplicaFacts, RequestRecord
from cluster.finding import Finding

_ids = itertools.count(1)

PREFILL_S = 0.001
"""Of one prompt token."""
BASE_S, EACH_S = 0.015, 0.001
"""Of a decode step, and of each sequence in it."""


def a_request(start_s: float = 0.0, **changes: Any) -> RequestRecord:
    """64 tokens after a prompt of 200, alone on replica-0; phases follow each other from the start."""
    values: dict[str, Any] = {
        "trace_id": f"{next(_ids):032x}",
        "start_s": start_s,
        "replica": "replica-0",
        "policy": "predicted-time",
        "prompt": 200,
        "output": 64,
        "prefill_s": 200 * PREFILL_S,
    } | changes
    values.setdefault("computed", values["prompt"] - values.get("cached", 0))
    values.setdefault("decode_s", (BASE_S + EACH_S) * (values["output"] - 1))
    before = values.get("held_s", 0.0) + values.get("queue_s", 0.0) + values["prefill_s"]
    values.setdefault("ttft_s", before)
    values.setdefault("first_token_s", start_s + before)
    values.setdefault("duration_s", before + values["decode_s"])
    return RequestRecord(**values)


def at_once(count: int, start_s: float, **changes: Any) -> list[RequestRecord]:
    """So many decoding beside each other, each step as long as their number makes it."""
    output = changes.get("output", 64)
    decode_s = (BASE_S + EACH_S * count) * (output - 1)
    return [a_request(start_s, decode_s=decode_s, prefill_s=0.02, **changes) for _ in range(count)]


def one_by_one(count: int, **changes: Any) -> list[RequestRecord]:
    """Requests that never meet."""
    return [a_request(100.0 * number, **changes) for number in range(count)]


def chosen(cached: int = 0, other: int = 0, kv_usage: float = 0.1) -> tuple[Candidate, ...]:
    """Two candidates: the one taken, and another with so much of the prompt cached."""
    return Candidate("replica-0", cached, kv_usage), Candidate("replica-1", other, 0.1)


def findings(requests: Sequence[RequestRecord], *replicas: ReplicaFacts, **more: Any) -> list[Finding]:
    """The diagnosis of these requests, on one healthy replica unless told otherwise."""
    return diagnose(Evidence(requests, replicas or (healthy(),), **more))


def causes(found: Iterable[Finding]) -> list[str]:
    return [finding.cause for finding in found]


def healthy(name: str = "replica-0", **changes: Any) -> ReplicaFacts:
    """A replica with room for everything."""
    values: dict[str, Any] = {"kv_tokens": 40_000, "max_sequences": 32, "max_batch_tokens": 512} | changes
    return ReplicaFacts(name, **values)
