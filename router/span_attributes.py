"""A routing decision as the attributes of spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

from router.observe import Outcome
from router.picker import Candidate
from telemetry import spans

if TYPE_CHECKING:
    from router.decide import Decision

Attributes = Mapping[str, AttributeValue]

_MOST_REASON_CHARS = 256
_MOST_CANDIDATES = 32
"""On a span; a router of hundreds of replicas does not list them all."""


def of_forward(decision: Decision, number: int) -> Attributes:
    """Of one attempt: where it goes, and what is expected of it."""
    attributes: dict[str, AttributeValue] = {
        spans.REPLICA: decision.replica,
        spans.EPOCH: decision.epoch,
        spans.ATTEMPT: number,
        spans.PREDICTED_TTFT_S: decision.ttft_ms / 1e3,
        spans.PREDICTED_CACHED_TOKENS: decision.expected_cached,
    }
    if decision.pooled_tokens:
        attributes[spans.PREDICTED_POOLED_TOKENS] = decision.pooled_tokens
        attributes[spans.PREDICTED_FETCH_S] = decision.fetch_ms / 1e3
    if decision.pull is not None:
        attributes[spans.KV_FETCH_SOURCE] = decision.pull.agent
    return attributes


def of_route(decision: Decision) -> Attributes:
    """Every candidate, the chosen one first, and why it was chosen."""
    listed = decision.candidates()
    first = [candidate for candidate in listed if candidate.chosen]
    rest = [candidate for candidate in listed if not candidate.chosen]
    attributes: dict[str, AttributeValue] = {
        spans.POLICY: decision.policy,
        spans.WHY: decision.why,
        spans.REPLICA: decision.replica,
        spans.EPOCH: decision.epoch,
        spans.CANDIDATES: [_line(candidate) for candidate in (first + rest)[:_MOST_CANDIDATES]],
    }
    if decision.degraded:
        attributes[spans.DEGRADED] = decision.degraded
    return attributes


def _line(candidate: Candidate) -> str:
    """One candidate as a reader of the trace wants it; times in ms."""
    source = f" source={candidate.source}" if candidate.source else ""
    degraded = f" degraded={candidate.degraded!r}" if candidate.degraded else ""
    return (
        f"{candidate.key} cached={candidate.cached_tokens} pending={candidate.pending_tokens} "
        f"pooled={candidate.pooled_tokens} uncached={candidate.uncached_tokens} "
        f"queue={candidate.queue_ms:.1f} prefill={candidate.prefill_ms:.1f} fetch={candidate.fetch_ms:.1f} "
        f"interference={candidate.interference_ms:.1f} overhead={candidate.overhead_ms:.1f} "
        f"ttft={candidate.ttft_ms:.1f} harm={candidate.harm_ms:.1f} affinity={candidate.affinity_ms:.1f} "
        f"score={candidate.score_ms:.1f} sequences={candidate.sequences} "
        f"backlog={candidate.backlog_tokens} kv={candidate.kv_usage:.2f}{source}{degraded}"
    )


def of_fetch(outcome: Outcome) -> Attributes:
    """Of blocks that came from a host's memory; nothing when none did and none were asked for."""
    attributes: dict[str, AttributeValue] = {}
    if outcome.pooled_tokens:
        attributes[spans.POOLED_TOKENS] = outcome.pooled_tokens
    if (fetch := outcome.fetch) is not None:
        attributes[spans.KV_FETCH_BLOCKS] = fetch.blocks
        attributes[spans.KV_FETCH_BYTES] = fetch.bytes
        if fetch.failed:
            attributes[spans.KV_FETCH_FAILED] = fetch.failed[:_MOST_REASON_CHARS]
    return attributes
