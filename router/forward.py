"""From a validated request to a finished stream: pick, lease, call, forward, and try again.

A request whose replica is lost before its first message goes to another one. After the first
message a loss ends the stream with UNAVAILABLE: a broken stream never ends as if it had finished.

The loop per streamed token is this module's hot path. Messages pass through as bytes; each is
parsed once, for the token count and the finish reasons, and never serialised again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from protos import common_pb2
from protos.errors import KvorumError, from_rpc_error
from router.leases import Lease, LeaseTable
from router.observe import AttemptScope, Outcome, RequestScope
from router.picker import Candidate, Policy, RouteRequest
from router.replica_link import Bytes

log = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]

_parse = common_pb2.GenerateResponse.FromString
_LOSS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_COME_BACK_S = 0.5


class Link(Protocol):
    """A replica that requests can be sent to; see `router.replica_link.ReplicaLink`."""

    @property
    def key(self) -> str: ...

    def candidate(self) -> Candidate: ...

    def doubt(self) -> None: ...

    def generate(
        self, request: bytes, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]
    ) -> Bytes: ...


class Links(Protocol):
    """Where the replicas come from; see `router.membership.Membership`."""

    def links(self, model: str, digest: str = "") -> Sequence[Link]: ...

    def no_replica(self, model: str, tried: str = "") -> KvorumError: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One validated request. `deadline` is in the event loop's time."""

    route: RouteRequest
    tokenizer_digest: str
    message: bytes  # a serialised ReplicaGenerateRequest
    served: common_pb2.Served  # request id, model and trace id are set
    deadline: float
    scope: RequestScope
    retryable: bool = True


class Forwarder:
    """Runs jobs over the replicas that `links` offers, chosen by `policy`, held by `leases`."""

    def __init__(
        self, links: Links, policy: Policy, leases: LeaseTable, *, policy_name: str, max_attempts: int
    ) -> None:
        self._links, self._policy, self._leases = links, policy, leases
        self._policy_name, self._max_attempts = policy_name, max_attempts

    async def run(self, job: Job, write: Write, outcome: Outcome) -> None:
        """Stream the answer to `write`; `outcome` is filled as tokens pass.

        Raises:
            KvorumError: nothing could serve it, the replica refused it, it was lost after its
                first message, or the deadline passed.
            asyncio.CancelledError: the client is gone; the replica's call is cancelled too.
        """
        tried: set[str] = set()
        lost = ""
        most = self._max_attempts if job.retryable else 1
        for number in range(1, most + 1):
            link, candidate = self._route(job, tried, lost)
            attempt = _Attempt(job, link, candidate, number, outcome)
            error = await attempt.run(self._leases, write)
            if error is None:
                return
            if error.code not in _LOSS:
                raise error
            link.doubt()
            if outcome.first_token_s is not None:
                raise _lost_midway(candidate, outcome.generated_tokens, error)
            tried.add(candidate.key)
            lost = f"lost before the first token: {', '.join(sorted(tried))} ({error.message})"
            log.warning("request %s, attempt %d: %s", job.served.request_id, number, lost)
        raise KvorumError(
            grpc.StatusCode.UNAVAILABLE,
            common_pb2.REPLICA_LOST,
            f"gave up after {most} attempt(s); {lost}",
            retry_after_s=_COME_BACK_S,
        )

    def _route(self, job: Job, tried: set[str], lost: str) -> tuple[Link, Candidate]:
        started_ns = time.time_ns()
        links = {
            link.key: link
            for link in self._links.links(job.route.model, job.tokenizer_digest)
            if link.key not in tried
        }
        candidates = [link.candidate() for link in links.values()]
        chosen = self._policy.pick(candidates, job.route) if candidates else None
        job.scope.routed(candidates, chosen, self._policy_name, started_ns)
        if chosen is None:
            raise self._links.no_replica(job.route.model, lost)
        return links[chosen.key], chosen


class _Attempt:
    """One call of one replica."""

    def __init__(self, job: Job, link: Link, candidate: Candidate, number: int, outcome: Outcome) -> None:
        self._job, self._link, self._candidate, self._number = job, link, candidate, number
        self._whole = outcome
        self._own = Outcome(prompt_tokens=len(job.route.prompt_token_ids))
        self._started = asyncio.get_running_loop().time()

    async def run(self, leases: LeaseTable, write: Write) -> KvorumError | None:
        """Forward the stream to its end; the error when it did not finish."""
        job, route = self._job, self._job.route
        scope = job.scope.attempt(self._candidate, self._number)
        left_s = job.deadline - self._started
        lease = leases.take(
            self._candidate.key,
            prefill_tokens=len(route.prompt_token_ids),
            decode_tokens=route.sequences * route.max_tokens,
            sequences=route.sequences,
        )
        call: Bytes | None = None
        error: KvorumError | None = None
        try:
            call = self._link.generate(
                job.message, timeout_s=max(left_s, 0.0), metadata=tuple(scope.metadata)
            )
            finished = await self._forward(call, write, lease, scope)
            if finished < route.sequences:
                error = _unfinished(finished, route.sequences)
        except grpc.aio.AioRpcError as failure:
            error = self._read(failure)
        except BaseException as failure:
            self._own.cancelled = isinstance(failure, asyncio.CancelledError)
            raise
        finally:
            if call is not None:
                call.cancel()  # frees the engine's blocks when this ends early; else does nothing
            lease.release()
            self._own.error = error
            scope.finished(self._own)
        return error

    async def _forward(self, call: Bytes, write: Write, lease: Lease, scope: AttemptScope) -> int:
        """Pass the messages on; how many sequences finished."""
        own, whole = self._own, self._whole
        read = call.read
        raw = await read()
        if not isinstance(raw, bytes):  # grpc.aio.EOF
            return 0
        first_s = asyncio.get_running_loop().time() - self._started
        own.first_token_s = whole.first_token_s = first_s
        scope.first_token()
        message = _parse(raw)
        whole.cached_tokens = own.cached_tokens = message.usage.cached_tokens
        tokens, finished = _count(message)
        own.generated_tokens = whole.generated_tokens = tokens
        lease.generated(tokens)
        # Concatenated protobuf messages parse as their merge: the first one gains `served`.
        await write(raw + self._served())
        while isinstance(raw := await read(), bytes):
            tokens, ended = _count(_parse(raw))
            finished += ended
            own.generated_tokens += tokens
            whole.generated_tokens += tokens
            lease.generated(tokens)
            await write(raw)
        return finished

    def _served(self) -> bytes:
        served = common_pb2.Served()
        served.CopyFrom(self._job.served)
        served.replica, served.epoch = self._candidate.replica, self._candidate.epoch
        served.attempt = self._number
        return common_pb2.GenerateResponse(served=served).SerializeToString()

    def _read(self, failure: grpc.aio.AioRpcError) -> KvorumError:
        """The replica's error as the client may see it."""
        error = from_rpc_error(failure)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return deadline_exceeded(self._whole.generated_tokens)
        if error.code is grpc.StatusCode.UNKNOWN:  # an exception in the replica: its text is for the log
            log.error("replica %s failed: %s", self._candidate.key, error.message)
            message = f"replica {self._candidate.replica} failed on request {self._job.served.request_id}"
            return KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)
        return error


def deadline_exceeded(generated_tokens: int) -> KvorumError:
    """The client's deadline, or the router's default one, passed."""
    return KvorumError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        common_pb2.DEADLINE_EXCEEDED,
        f"the deadline passed after {generated_tokens} generated tokens",
    )


def _count(message: common_pb2.GenerateResponse) -> tuple[int, int]:
    """Tokens in the message, and sequences that it finishes."""
    tokens = finished = 0
    for choice in message.choices:
        tokens += len(choice.token_ids)
        if choice.finish_reason:
            finished += 1
    return tokens, finished


def _unfinished(finished: int, asked: int) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"the replica ended its stream after {finished} of {asked} sequences had finished",
    )


def _lost_midway(candidate: Candidate, tokens: int, error: KvorumError) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"replica {candidate.replica} was lost after {tokens} tokens ({error.message}); "
        "the stream is incomplete, send the request again",
        metadata={"replica": candidate.replica, "epoch": candidate.epoch},
    )
