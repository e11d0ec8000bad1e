"""A replica and a controller without an engine or Ray: real gRPC servers with scripted behaviour."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from protos import admin_pb2, admin_pb2_grpc, blockkeys, common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bind, create_server
from protos.errors import KvorumError, to_status
from protos.tickets import TicketCheck

DIGEST = "tokenizer-1"
GENERATE = "/kvorum.v1.Replica/Generate"


def model_info(name: str = "fake", **changes: Any) -> common_pb2.ModelInfo:
    values: dict[str, Any] = {
        "name": name,
        "revision": "r1",
        "max_model_len": 512,
        "vocab_size": 1000,
        "tokenizer_digest": DIGEST,
        "lora_adapters": ["poet"],
        "max_logprobs": 20,
    }
    return common_pb2.ModelInfo(**{**values, **changes})


def packed(keys: set[int]) -> bytes:
    """As `BlockChange` carries them."""
    return np.array(sorted(keys), "<u8").tobytes()


@dataclass
class Script:
    """What a FakeReplica does with each request; token k of every sequence is k+1."""

    tokens: int = 4  # when the request has no max_tokens
    first_token_s: float = 0.0
    gate: asyncio.Event | None = None  # no first token before it is set
    pace_s: float = 0.0
    error_at_start: KvorumError | None = None
    error_after: tuple[int, KvorumError] | None = None
    hang_after: int | None = None
    end_early_after: int | None = None  # ends OK without finish reasons
    crash_after: int | None = None  # raises an ordinary exception
    cached_tokens: int = 0
    times: common_pb2.EngineTimes | None = None  # on the first message
    pooled_tokens: int = 0
    kv_fetch: common_pb2.KvFetch | None = None  # on the first message of a request that came with a source


@dataclass
class Seen:
    """What reached a FakeReplica."""

    request: replica_pb2.ReplicaGenerateRequest
    metadata: dict[str, str]
    remaining_s: float | None
    cancelled: bool = False
    answered: bool = False  # has had its first token
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeReplica(replica_pb2_grpc.ReplicaServicer):
    """Serves `kvorum.v1.Replica` on a free port of loopback."""

    _epochs = itertools.count(1)

    def __init__(
        self,
        name: str = "r0",
        *,
        script: Script | None = None,
        model: common_pb2.ModelInfo | None = None,
        token: str | None = None,
        heartbeat_s: float = 0.1,
    ) -> None:
        self.name, self.script = name, script or Script()
        self.model = model or model_info()
        self.token, self.heartbeat_s = token, heartbeat_s
        self.epoch = f"e{next(self._epochs)}"
        self.load = common_pb2.ReplicaLoad()
        self.counts_itself = False  # reports the sequences and the backlog of what it really runs
        self.draining = False
        self.speaking = asyncio.Event()  # cleared: connected, but no updates
        self.speaking.set()
        self.port = 0
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.watchers = 0
        self.snapshots = 0  # asked for since the start
        self.block_size = 16
        self.blocks: set[int] = set()  # keys; watchers are told what changed at the next update
        self.pool: replica_pb2.KvPool | None = None
        self.host_blocks: set[int] = set()  # keys, likewise, of the pool
        self.edit_update: Callable[[replica_pb2.ReplicaUpdate], None] = lambda update: None
        self._push = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def member(self, state: admin_pb2.ReplicaState.ValueType = admin_pb2.READY) -> admin_pb2.Member:
        return admin_pb2.Member(
            replica=self.name, epoch=self.epoch, address=self.address, state=state, model=self.model
        )

    async def start(self) -> FakeReplica:
        self._server = create_server(
            tokens=[self.token] if self.token else [],
            ticketed={GENERATE: TicketCheck(self.token, self.name, self.epoch)} if self.token else {},
        )
        replica_pb2_grpc.add_ReplicaServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", self.port)
        await self._server.start()
        return self

    async def die(self) -> None:
        """Every connection breaks at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """The same address, a fresh epoch."""
        await self.die()
        self.epoch = f"e{next(self._epochs)}"
        await self.start()

    def push(self) -> None:
        """Send an update to the watchers now instead of at the next heartbeat."""
        self._push.set()

    def running(self) -> int:
        return sum(not seen.ended.is_set() for seen in self.seen)

    async def Generate(  # noqa: N802
        self, request: replica_pb2.ReplicaGenerateRequest, context: Any
    ) -> AsyncIterator[common_pb2.GenerateResponse]:
        metadata = {k: v for k, v in context.invocation_metadata() if isinstance(v, str)}
        seen = Seen(request, metadata, context.time_remaining())
        self.seen.append(seen)
        self.arrived.set()
        try:
            async for message in self._generate(request, context):
                seen.answered = True
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            seen.cancelled = True
            raise
        finally:
            seen.ended.set()

    async def _generate(
        self, request: replica_pb2.ReplicaGenerateRequest, context: Any
    ) -> AsyncIterator[common_pb2.GenerateResponse]:
        script, sampling = self.script, request.sampling
        if script.error_at_start is not None:
            await context.abort_with_status(to_status(script.error_at_start))
        count = sampling.max_tokens if sampling.HasField("max_tokens") else script.tokens
        n = sampling.n if sampling.HasField("n") else 1
        await asyncio.sleep(script.first_token_s)
        if script.gate is not None:
            await script.gate.wait()
        for k in range(count):
            if script.error_after is not None and k == script.error_after[0]:
                await context.abort_with_status(to_status(script.error_after[1]))
            if k == script.hang_after:
                await asyncio.Event().wait()
            if k == script.end_early_after:
                return
            if k == script.crash_after:
                raise RuntimeError("secret detail of the replica")
            yield self._message(request, k, count, n)
            if script.pace_s:
                await asyncio.sleep(script.pace_s)

    def _message(
        self, request: replica_pb2.ReplicaGenerateRequest, k: int, count: int, n: int
    ) -> common_pb2.GenerateResponse:
        message = common_pb2.GenerateResponse()
        last = k == count - 1
        for index in range(n):
            reason = common_pb2.LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
            message.choices.add(index=index, text=f" t{k + 1}", token_ids=[k + 1], finish_reason=reason)
        if k == 0 or last:
            message.usage.prompt_tokens = len(request.prompt_token_ids)
            message.usage.cached_tokens = self.script.cached_tokens
            message.usage.pooled_tokens = self.script.pooled_tokens
            message.usage.completion_tokens = (k + 1) * n
        if k == 0 and self.script.times is not None:
            message.times.CopyFrom(self.script.times)
        if k == 0 and self.script.kv_fetch is not None and request.HasField("kv_source"):
            message.kv_fetch.CopyFrom(self.script.kv_fetch)
        return message

    def _load(self) -> common_pb2.ReplicaLoad:
        if not self.counts_itself:
            return self.load
        load = common_pb2.ReplicaLoad()
        load.CopyFrom(self.load)
        running = [seen for seen in self.seen if not seen.ended.is_set()]
        load.sequences = load.running = len(running)
        load.prefill_backlog_tokens, load.prefill_backlog_pairs = 0, 0.0
        for seen in running:
            if not seen.answered:
                cached = seen.request.expected_cached_tokens
                left = len(seen.request.prompt_token_ids) - cached
                load.prefill_backlog_tokens += left
                load.prefill_backlog_pairs += left * (cached + left / 2)
        return load

    async def Drain(  # noqa: N802
        self, request: replica_pb2.DrainRequest, context: Any
    ) -> replica_pb2.DrainResponse:
        self.draining = True
        self.push()
        return replica_pb2.DrainResponse()

    async def WatchReplica(  # noqa: N802
        self, request: replica_pb2.WatchReplicaRequest, context: Any
    ) -> AsyncIterator[replica_pb2.ReplicaUpdate]:
        self.watchers += 1
        self.snapshots += 1
        told: set[int] = set()
        host_told: set[int] = set()
        try:
            for seq in itertools.count(1):
                update = replica_pb2.ReplicaUpdate(
                    epoch=self.epoch,
                    seq=seq,
                    load=self._load(),
                    draining=self.draining,
                    block_size=self.block_size,
                    blocks_count=len(self.blocks) + len(self.host_blocks),
                )
                if seq == 1:
                    update.snapshot.replica = self.name
                    update.snapshot.model.CopyFrom(self.model)
                    update.snapshot.heartbeat_s = self.heartbeat_s
                    update.snapshot.key_scheme = blockkeys.SCHEME
                    if self.pool is not None:
                        update.snapshot.pool.CopyFrom(self.pool)
                if told != self.blocks:
                    update.blocks.add(stored=packed(self.blocks - told), removed=packed(told - self.blocks))
                if host_told != self.host_blocks:
                    stored, removed = self.host_blocks - host_told, host_told - self.host_blocks
                    update.blocks.add(tier=replica_pb2.HOST, stored=packed(stored), removed=packed(removed))
                for key in (*self.blocks, *self.host_blocks):
                    update.blocks_xor ^= key
                told, host_told = set(self.blocks), set(self.host_blocks)
                self.edit_update(update)
                await self.speaking.wait()
                yield update
                try:
                    await asyncio.wait_for(self._push.wait(), self.heartbeat_s)
                except TimeoutError:
                    continue
                self._push.clear()
        finally:
            self.watchers -= 1


class FakeController(admin_pb2_grpc.AdminServicer):
    """Serves `WatchMembers` and `GetTokenizer` on a free port of loopback."""

    def __init__(self, *, token: str | None = None) -> None:
        self.token, self.port = token, 0
        self.members: list[admin_pb2.Member] = []
        self.bundles: dict[str, admin_pb2.TokenizerBundle] = {
            DIGEST: admin_pb2.TokenizerBundle(digest=DIGEST)
        }
        self.tokenizer_requests: list[str] = []
        self._version = 0
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeController:
        self._server = create_server(tokens=[self.token] if self.token else [])
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", self.port)
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def announce(self, *members: admin_pb2.Member) -> None:
        """These are the members now."""
        async with self._changed:
            self.members = list(members)
            self._version += 1
            self._changed.notify_all()

    async def WatchMembers(  # noqa: N802
        self, request: admin_pb2.WatchMembersRequest, context: Any
    ) -> AsyncIterator[admin_pb2.Members]:
        while True:
            version = self._version
            yield admin_pb2.Members(members=self.members, version=version)
            async with self._changed:
                while self._version == version:
                    await self._changed.wait()

    async def GetTokenizer(  # noqa: N802
        self, request: admin_pb2.GetTokenizerRequest, context: Any
    ) -> admin_pb2.TokenizerBundle:
        self.tokenizer_requests.append(request.digest)
        if request.digest not in self.bundles:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no tokenizer {request.digest}")
        return self.bundles[request.digest]

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.ClusterStatus:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")
        return admin_pb2.ClusterStatus()

    async def GetModelFiles(  # noqa: N802
        self, request: admin_pb2.GetModelFilesRequest, context: Any
    ) -> admin_pb2.ModelFiles:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")
        return admin_pb2.ModelFiles()

    async def GetOverlap(  # noqa: N802
        self, request: admin_pb2.GetOverlapRequest, context: Any
    ) -> admin_pb2.OverlapStatus:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")
        return admin_pb2.OverlapStatus()

    async def RestartReplica(  # noqa: N802
        self, request: admin_pb2.RestartReplicaRequest, context: Any
    ) -> admin_pb2.RestartReplicaResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")
        return admin_pb2.RestartReplicaResponse()

    async def Shutdown(  # noqa: N802
        self, request: admin_pb2.ShutdownRequest, context: Any
    ) -> admin_pb2.ShutdownResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")
        return admin_pb2.ShutdownResponse()
