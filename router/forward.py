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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError, from_rpc_error
from router.decide import Decision
from router.group import Bytes, Placement, ReplicaGroup, Wanted, gave_up, loop_time
from router.observe import AttemptScope, Outcome, RequestScope

log = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]

_parse = common_pb2.GenerateResponse.FromString
_LOSS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Job:
    """One validated request."""

    group: ReplicaGroup
    wanted: Wanted
    message: bytes  # a serialised ReplicaGenerateRequest
    served: common_pb2.Served  # request id, model and trace id are set
    scope: RequestScope
    retryable: bool = True

    @property
    def sequences(self) -> int:
        return self.wanted.route.sequences

    def replica_request(self, placement: Placement, attempt_id: str = "") -> bytes:
        """What to send for one attempt: concatenated protobuf messages parse as their merge."""
        decision, pull = placement.decision, placement.decision.pull
        own = replica_pb2.ReplicaGenerateRequest(
            expected_cached_tokens=decision.expected_cached, attempt_id=attempt_id
        )
        if pull is not None:
            own.kv_source.agent, own.kv_source.blocks = pull.agent, pull.blocks
        return self.message + own.SerializeToString()

    def served_by(self, placement: Placement, attempt: int) -> common_pb2.Served:
        """Who serves it, for the first message."""
        served = common_pb2.Served()
        served.CopyFrom(self.served)
        served.replica, served.epoch = placement.decision.replica, placement.decision.epoch
        served.attempt = attempt
        return served


class Forwarder:
    """Runs jobs on the replicas of their group."""

    def __init__(self, *, max_attempts: int) -> None:
        self._max_attempts = max_attempts

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
            placement = await placed(job, tried, lost)
            try:
                error = await _Attempt(job, placement, number, outcome).run(write)
            finally:
                placement.release()
            if error is None:
                return
            if error.code not in _LOSS:
                raise error
            placement.link.doubt()
            decision = placement.decision
            if outcome.first_token_s is not None:
                raise _lost_midway(decision, outcome.generated_tokens, error)
            tried.add(decision.key)
            lost = f"lost before the first token: {', '.join(sorted(tried))} ({error.message})"
            log.warning("request %s, attempt %d: %s", job.served.request_id, number, lost)
        raise gave_up(most, lost)


async def placed(job: Job, tried: set[str] | frozenset[str] = frozenset(), lost: str = "") -> Placement:
    """A place for the job, told to its scope."""
    started_ns = time.time_ns()
    try:
        placement = await job.group.place(job.wanted, exclude=tried, lost=lost)
    except (KvorumError, asyncio.CancelledError) as error:
        job.scope.unplaced(error if isinstance(error, KvorumError) else None, started_ns)
        raise
    job.scope.placed(placement, started_ns)
    return placement


class _Attempt:
    """One call of one replica."""

    def __init__(self, job: Job, placement: Placement, number: int, outcome: Outcome) -> None:
        self._job, self._placement, self._number = job, placement, number
        self._whole = outcome
        self._own = Outcome(prompt_tokens=placement.decision.prompt_tokens)
        self._started = loop_time()
        self._times: common_pb2.EngineTimes | None = None

    async def run(self, write: Write) -> KvorumError | None:
        """Forward the stream to its end; the error when it did not finish."""
        job, placement = self._job, self._placement
        scope = job.scope.attempt(placement.decision, self._number)
        call: Bytes | None = None
        error: KvorumError | None = None
        finished = 0
        try:
            call = placement.link.generate(
                job.replica_request(placement),
                timeout_s=max(job.wanted.deadline - self._started, 0.0),
                metadata=tuple(scope.metadata),
            )
            finished = await self._forward(call, write, scope)
            if finished < job.sequences:
                error = _unfinished(finished, job.sequences)
        except grpc.aio.AioRpcError as failure:
            error = self._read(failure)
        except TimeoutError:  # the whole request's time is over
            self._own.cancelled = True
            raise
        except asyncio.CancelledError:
            if _cancelling():
                self._own.cancelled = True
                raise
            # Its call was, by the replica's link, and not this task: raised on, it would end nothing.
            error = _ended(placement)
        except Exception as failure:
            message = f"forwarding failed: {type(failure).__name__}"
            error = KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)
            raise
        finally:
            if call is not None:
                call.cancel()  # frees the engine's blocks when this ends early; else does nothing
            self._learn(whole=error is None and finished >= job.sequences)
            self._own.error = error
            scope.finished(self._own)
        return error

    async def _forward(self, call: Bytes, write: Write, scope: AttemptScope) -> int:
        """Pass the messages on; how many sequences finished."""
        own, whole, lease = self._own, self._whole, self._placement.lease
        read = call.read
        raw = await read()
        if not isinstance(raw, bytes):  # grpc.aio.EOF
            return 0
        self._placement.link.answered(call)
        own.first_token_s = whole.first_token_s = loop_time() - self._started
        message = _parse(raw)
        reader = scope.reader
        if reader is not None:
            reader(message)
        whole.cached_tokens = own.cached_tokens = message.usage.cached_tokens
        whole.pooled_tokens = own.pooled_tokens = message.usage.pooled_tokens
        if message.HasField("kv_fetch"):
            whole.fetch = own.fetch = message.kv_fetch
            self._placement.fetched(message.kv_fetch)
        self._times = message.times if message.HasField("times") else None
        tokens, finished = _count(message)
        own.generated_tokens = whole.generated_tokens = tokens
        lease.generated(tokens)
        self._placement.first_token()
        # Concatenated protobuf messages parse as their merge: the first one gains `served`.
        served = self._job.served_by(self._placement, self._number)
        await write(raw + common_pb2.GenerateResponse(served=served).SerializeToString())
        while isinstance(raw := await read(), bytes):
            message = _parse(raw)
            if reader is not None:
                reader(message)
            tokens, ended = _count(message)
            finished += ended
            own.generated_tokens += tokens
            whole.generated_tokens += tokens
            lease.generated(tokens)
            await write(raw)
        return finished

    def _learn(self, *, whole: bool) -> None:
        own = self._own
        if self._times is None or own.first_token_s is None:
            return
        self._placement.learn(
            self._times,
            cached=own.cached_tokens,
            ttft_s=own.first_token_s,
            pull_s=own.pull_s,
            generated=own.generated_tokens / self._job.sequences if whole else None,
        )

    def _read(self, failure: grpc.aio.AioRpcError) -> KvorumError:
        """The replica's error as the client may see it."""
        error = from_rpc_error(failure)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return deadline_exceeded(self._whole.generated_tokens)
        if error.code is grpc.StatusCode.UNKNOWN:  # an exception in the replica: its text is for the log
            replica = self._placement.decision.replica
            log.error("replica %s failed: %s", self._placement.decision.key, error.message)
            message = f"replica {replica} failed on request {self._job.served.request_id}"
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


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ended(placement: Placement) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"replica {placement.decision.replica} {placement.link.why_ended}",
    )


def _unfinished(finished: int, asked: int) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"the replica ended its stream after {finished} of {asked} sequences had finished",
    )


def _lost_midway(decision: Decision, tokens: int, error: KvorumError) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_LOST,
        f"replica {decision.replica} was lost after {tokens} tokens ({error.message}); "
        "the stream is incomplete, send the request again",
        metadata={"replica": decision.replica, "epoch": decision.epoch},
    )
