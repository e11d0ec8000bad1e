"""The replica's gRPC face: Generate, WatchReplica, Drain, GetMetrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from vllm.outputs import RequestOutput

from protos import common_pb2, replica_pb2, replica_pb2_grpc
from protos.errors import KvorumError, invalid, to_status
from workers.accepted import Acceptance
from workers.engine import Engine
from workers.engine_metrics import engine_metrics
from workers.feed import UpdateFeed
from workers.kvpool.prefetch import Prefetcher
from workers.observe import GenerateObserver, Sent
from workers.translate import fill_prompt_logprobs, to_response

log = logging.getLogger(__name__)

_DRAINED = "outlived the drain's grace"


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Serves one engine. Knows every running request, so that draining can wait for them."""

    def __init__(
        self,
        engine: Engine,
        snapshot: replica_pb2.ReplicaSnapshot,
        epoch: str,
        observer: GenerateObserver,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """`prefetcher`: None where no blocks are had from other hosts."""
        self._engine = engine
        self._vocab = snapshot.model.vocab_size
        self._prefetcher = prefetcher
        self._feed = UpdateFeed(
            epoch,
            snapshot,
            engine.journal,
            engine.resident,
            engine.load.snapshot,
            pool=lambda: engine.kv_pool,
        )
        engine.on_change(self._feed.touch)
        self._observer = observer
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._feed.draining

    async def Generate(  # noqa: N802
        self, request: replica_pb2.ReplicaGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common_pb2.GenerateResponse]:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        scope, stream = None, _Stream(request)
        try:
            scope = self._observer.start(request, context.invocation_metadata() or ())
            with self._accept(request) as (accepted, keys):
                stream.sent.accepted = True
                if request.kv_source.blocks > 0:
                    await self._prefetch(request.kv_source, keys, context.time_remaining(), stream.sent)
                async for output in self._engine.generate(request):
                    accepted.first_token()
                    response = stream.respond(output, self._engine.pooled_tokens.of(request.request_id))
                    _raise_failed(request, response)
                    yield response
            scope.finish(None, stream.sent)
        except BaseException as error:
            # A cancelled call ends here too; the engine has already been told to abort.
            refused = _as_refusal(error)
            if scope is not None:
                scope.finish(refused or error, stream.sent)
            if refused is None:
                raise
            if isinstance(error, asyncio.CancelledError):
                task.uncancel()  # ours: the call itself lives, and is owed a status
            await context.abort_with_status(to_status(refused))
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    @contextmanager
    def _accept(
        self, request: replica_pb2.ReplicaGenerateRequest
    ) -> Iterator[tuple[Acceptance, Sequence[int]]]:
        """Refuse what cannot run; hold the load of what can until it ends, however it ends.

        With the keys of the prompt's full blocks; none when the engine's blocks are not known.
        """
        if self.draining:
            raise _draining()
        if not request.prompt_token_ids:
            raise invalid("prompt_token_ids", "must not be empty", common_pb2.PROMPT_EMPTY)
        tokens = np.fromiter(request.prompt_token_ids, np.int32, len(request.prompt_token_ids))
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise invalid("prompt_token_ids", f"must be in [0, {self._vocab})")
        resident = self._engine.resident
        keys: Sequence[int] = ()
        if not resident.degraded:
            keys = resident.prompt_keys(tokens, request.lora, request.cache_salt)
        with self._engine.load.accepted.accept(
            max(1, request.sampling.n),
            len(tokens),
            keys=keys,
            block_size=resident.block_size,
            expected_cached_tokens=request.expected_cached_tokens,
        ) as accepted:
            self._feed.touch()
            try:
                yield accepted, keys
            finally:
                self._feed.touch()

    async def _prefetch(
        self, source: replica_pb2.KvSource, keys: Sequence[int], time_left_s: float | None, sent: Sent
    ) -> None:
        """Bring what this host lacks of the prompt's blocks from where the router says that they are.

        The engine finds in the pool what has come, and computes the rest: nothing here fails a request.
        """
        pool, resident, wanted = self._engine.kv_pool, self._engine.resident, keys[: source.blocks]
        lacking = [key for key in wanted[resident.local_prefix(wanted) :] if key not in resident.pool]
        if self._prefetcher is None or pool is None or not pool.agent or not lacking:
            return
        sent.fetch_at = time.monotonic()
        sent.fetch = await self._prefetcher.fetch(
            pool.agent, pool.namespace, source.agent, lacking, time_left_s
        )

    async def WatchReplica(  # noqa: N802
        self, request: replica_pb2.WatchReplicaRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica_pb2.ReplicaUpdate]:
        async for update in self._feed.updates():
            yield update

    async def Drain(  # noqa: N802
        self, request: replica_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica_pb2.DrainResponse:
        return replica_pb2.DrainResponse(aborted=await self.drain(request.grace_s))

    async def GetMetrics(  # noqa: N802
        self, request: replica_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica_pb2.GetMetricsResponse:
        return replica_pb2.GetMetricsResponse(text=await asyncio.to_thread(engine_metrics))

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many were cut off."""
        self._feed.draining = True
        self._feed.touch()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            cut = list(self._running)
            for task in cut:
                task.cancel(_DRAINED)
            await asyncio.wait(cut, timeout=2.0)
            return len(cut)
        return 0


def _raise_failed(request: replica_pb2.ReplicaGenerateRequest, response: common_pb2.GenerateResponse) -> None:
    """The engine ends a request it cannot run as if it had finished, with the reason "error"."""
    if all(choice.finish_reason != common_pb2.ERROR for choice in response.choices):
        return
    if request.sampling.HasField("structured"):
        raise invalid("sampling.structured", "the engine cannot compile this constraint")
    raise KvorumError(
        grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, f"the engine failed on request {request.request_id}"
    )


def _as_refusal(error: BaseException) -> KvorumError | None:
    """What to tell the client; gRPC itself sends nothing for a handler that was cancelled by us."""
    if isinstance(error, KvorumError):
        return error
    return _draining() if isinstance(error, asyncio.CancelledError) and error.args == (_DRAINED,) else None


def _draining() -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.REPLICA_DRAINING,
        "this replica is draining",
        retry_after_s=1.0,
    )


class _Stream:
    """Adds to one request's messages what only the first and the last carry; keeps account of all."""

    def __init__(self, request: replica_pb2.ReplicaGenerateRequest) -> None:
        self._request = request
        self.sent = Sent(len(request.prompt_token_ids))

    def respond(self, output: RequestOutput, pooled_tokens: int) -> common_pb2.GenerateResponse:
        response, sent, times = to_response(output), self.sent, output.metrics
        sent.times = times
        for choice in response.choices:
            sent.generated_tokens += len(choice.token_ids)
            if choice.finish_reason:
                sent.finish_reasons.append(choice.finish_reason)
        first, finished = not sent.first_at, output.finished
        if not (first or finished):
            return response
        if first:
            sent.first_at = time.monotonic()
            if sent.fetch is not None:
                response.kv_fetch.CopyFrom(sent.fetch)
            if output.prompt_logprobs is not None:
                fill_prompt_logprobs(response, self._request.prompt_token_ids, output.prompt_logprobs)
        sent.cached_tokens = max(sent.cached_tokens, output.num_cached_tokens or 0)
        sent.pooled_tokens = min(pooled_tokens, sent.cached_tokens)
        usage = response.usage
        usage.prompt_tokens, usage.cached_tokens = sent.prompt_tokens, sent.cached_tokens
        usage.completion_tokens = sent.generated_tokens
        usage.pooled_tokens = sent.pooled_tokens
        if output.num_cache_creation_tokens is not None:
            usage.cache_creation_tokens = output.num_cache_creation_tokens
        if times is not None:
            response.times.queue = max(0.0, times.scheduled_ts - times.queued_ts)
            response.times.prefill = max(0.0, times.first_token_ts - times.scheduled_ts)
            response.times.decode = max(0.0, times.last_token_ts - times.first_token_ts)
        return response
