"""Lookaside: the router decides, the client streams from the replica itself, and says how it goes.

A lease ends when the client reports the end, or has reported nothing for as long as a ticket is good. The
stream of a client that never reports progress may outlive its lease: the replica's own load report counts
it by then.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import dataclass

import grpc

from protos import common_pb2, inference_pb2, tickets
from protos.errors import KvorumError
from router.forward import Job, placed
from router.group import Placement, loop_time
from router.observe import AttemptScope, Outcome

_MOST_TTFT_S = 3600.0
_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
_ATTEMPT_ID = re.compile("[0-9a-f]{32}", re.ASCII)


@dataclass(slots=True)
class _Routed:
    job: Job
    placement: Placement
    scope: AttemptScope
    timer: asyncio.TimerHandle
    generated: int = 0  # tokens reported until now


class Lookaside:
    """At most `most` attempts at a time.

    Args:
        secret: the cluster's token, which replicas know as well; without one no ticket can be made.
        ticket_s: a stream must begin within this time; the lease of a client silent for so long ends.
    """

    def __init__(self, secret: str | None, *, ticket_s: float, most: int) -> None:
        self._secret, self._ticket_s, self._most = secret, ticket_s, most
        self._attempts: dict[str, _Routed] = {}
        self._placing = 0

    def __len__(self) -> int:
        """Attempts whose end is not known yet."""
        return len(self._attempts)

    async def route(self, job: Job, wanted_id: str = "") -> inference_pb2.RouteResponse:
        """Place the job, and let its client run it. `wanted_id`: the id that the client wants for it.

        Raises:
            KvorumError: FAILED_PRECONDITION without a cluster token, RESOURCE_EXHAUSTED when too many
                attempts are open, or what placing raises.
        """
        if not self._secret:
            message = "this router has no cluster token to sign tickets with; use Generate"
            raise KvorumError(grpc.StatusCode.FAILED_PRECONDITION, common_pb2.FEATURE_NOT_ENABLED, message)
        if len(self._attempts) + self._placing >= self._most:
            message = f"{self._most} routed streams are open, the most this router keeps; report ends sooner"
            raise KvorumError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, message, retry_after_s=1.0
            )
        self._placing += 1
        try:
            placement = await placed(job)
        finally:
            self._placing -= 1
        free = _ATTEMPT_ID.fullmatch(wanted_id) and wanted_id not in self._attempts
        decision, attempt_id = placement.decision, wanted_id if free else uuid.uuid4().hex
        scope = job.scope.attempt(decision, 1)
        try:
            request = job.replica_request(placement, attempt_id)
            ticket = tickets.sign(
                self._secret,
                request,
                replica=decision.replica,
                epoch=decision.epoch,
                attempt_id=attempt_id,
                expires_at=time.time() + self._ticket_s,
            )
        except Exception as error:
            placement.release()
            message = f"no ticket can be made for this attempt: {error}"
            failure = KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)
            scope.finished(Outcome(error=failure))
            raise failure from error
        self._attempts[attempt_id] = _Routed(job, placement, scope, self._timer(attempt_id))
        return inference_pb2.RouteResponse(
            address=placement.link.address,
            attempt_id=attempt_id,
            ticket=ticket,
            replica_request=request,
            served=job.served_by(placement, 1),
            expires_in_s=self._ticket_s,
            metadata=dict(scope.metadata),
        )

    def progress(self, report: inference_pb2.ReportProgressRequest) -> None:
        """The client's word that an attempt goes on; ignored like `report`, and past the job's deadline."""
        routed = self._attempts.get(report.attempt_id)
        if routed is None or loop_time() > routed.job.wanted.deadline:
            return
        routed.timer.cancel()
        routed.timer = self._timer(report.attempt_id)
        more = report.generated_tokens - routed.generated
        if more <= 0:
            return
        routed.placement.lease.generated(more)
        if not routed.generated:
            routed.placement.first_token()
        routed.generated += more

    def report(self, end: inference_pb2.ReportEndRequest) -> None:
        """The client's word on an attempt; one that has expired, or was never routed here, is ignored."""
        routed = self._attempts.get(end.attempt_id)
        if routed is None:
            return
        prompt_tokens = routed.placement.decision.prompt_tokens
        # A client's figures may be absurd; what is learned from them and measured must not be.
        ttft_s = end.ttft_s if end.HasField("ttft_s") and 0 <= end.ttft_s < _MOST_TTFT_S else None
        usage = end.usage
        sane = ttft_s is not None and 0 <= usage.pooled_tokens <= usage.cached_tokens <= prompt_tokens
        outcome = Outcome(
            prompt_tokens=prompt_tokens,
            cached_tokens=usage.cached_tokens if sane else 0,
            pooled_tokens=usage.pooled_tokens if sane else 0,
            generated_tokens=max(usage.completion_tokens, 0),
            first_token_s=ttft_s if sane else None,
            fetch=_fetch(end, ttft_s),
        )
        if end.lost:
            routed.placement.link.doubt()
            outcome.error = KvorumError(
                grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the client lost the replica"
            )
        elif not end.finished:
            outcome.error = _told(end)
            outcome.cancelled = outcome.error is None
        if outcome.fetch is not None:
            routed.placement.fetched(outcome.fetch)
        if not end.lost and outcome.first_token_s is not None and end.HasField("times"):
            route = routed.job.wanted.route
            generated = min(outcome.generated_tokens / route.sequences, route.max_tokens)
            routed.placement.learn(
                end.times,
                cached=outcome.cached_tokens,
                ttft_s=outcome.first_token_s,
                pull_s=outcome.pull_s,
                generated=generated if end.finished else None,
            )
        self._end(end.attempt_id, outcome)

    def close(self) -> None:
        """Release everything."""
        for attempt_id in list(self._attempts):
            self._expire(attempt_id)

    def _timer(self, attempt_id: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._ticket_s, self._expire, attempt_id)

    def _expire(self, attempt_id: str) -> None:
        self._end(attempt_id, Outcome(cancelled=True))

    def _end(self, attempt_id: str, outcome: Outcome) -> None:
        routed = self._attempts.pop(attempt_id)
        routed.timer.cancel()
        routed.placement.release()
        routed.scope.finished(outcome)
        routed.job.scope.finished(outcome)


def _told(end: inference_pb2.ReportEndRequest) -> KvorumError | None:
    """The error that the client got, if it says so."""
    code = _CODES.get(end.code)
    known = end.reason in common_pb2.Reason.values()
    return (
        None
        if code is None
        else KvorumError(
            code,
            end.reason if known else common_pb2.REASON_UNSPECIFIED,
            "the client's stream ended with this",
        )
    )


def _fetch(end: inference_pb2.ReportEndRequest, ttft_s: float | None) -> common_pb2.KvFetch | None:
    """What the client says of blocks from another host, if it can be: they came before the first token."""
    fetch = end.kv_fetch
    if not end.HasField("kv_fetch") or ttft_s is None:
        return None
    return fetch if 0 <= fetch.seconds <= ttft_s and fetch.blocks >= 0 and fetch.bytes >= 0 else None
