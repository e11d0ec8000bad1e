"""A decision as the message that `Inference.Explain` returns."""

from __future__ import annotations

from dataclasses import asdict

from protos import inference_pb2
from router.group import ReplicaGroup
from router.picker import Candidate, RouteRequest

_MOST_INT32 = 2**31 - 1


def explained(group: ReplicaGroup, route: RouteRequest) -> inference_pb2.ExplainResponse:
    """What would be decided for `route` now; nothing is leased."""
    found = group.explain(route)
    decision = found.decision
    return inference_pb2.ExplainResponse(
        model=group.model,
        prompt_tokens=len(route.prompt_token_ids),
        block_size=group.fleet.block_size,
        policy=group.decider.policy.name,
        chosen=decision.replica if decision is not None else "",
        why=decision.why if decision is not None else "no replica may be picked now",
        candidates=[_report(candidate) for candidate in found.candidates],
        queue_length=len(group.turnstile),
        queue_wait_ms=group.drain_s() * 1e3,
    )


def _report(candidate: Candidate) -> inference_pb2.CandidateReport:
    # What replicas say of their load may sum up to more than the field holds.
    fields = asdict(candidate) | {"sequences": min(candidate.sequences, _MOST_INT32)}
    return inference_pb2.CandidateReport(**fields)
