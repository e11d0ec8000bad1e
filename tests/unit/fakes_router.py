"""A whole router in front of fake replicas, as the tests of its behaviour want it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fakes_cluster import FakeController, FakeReplica, Script
from fakes_tokenizer import FakeTokenizer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.blockhash import prompt_keys
from router.client import KvorumClient
from router.config import RouterConfig
from router.group import ReplicaGroup
from router.metrics import RouterMetrics
from router.observe import Observer
from router.server import RouterServer
from router.tracing import TracingObserver
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.metrics import Meters
from telemetry.setup import Telemetry


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `holds` does; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 (what it looks at has no event)
            await asyncio.sleep(0.005)


async def collected(client: KvorumClient, *args: Any, **kwargs: Any) -> list[common_pb2.GenerateResponse]:
    """Every message of one request."""
    return [message async for message in client.generate(*args, **kwargs)]


def warmed(replica: FakeReplica, tokens: Sequence[int], **namespace: str) -> set[int]:
    """The replica's engine caches this prompt; returns its block keys."""
    keys = prompt_keys(np.array(tokens, np.int32), replica.block_size, replica.model.revision, **namespace)
    replica.blocks = replica.blocks | set(keys.tolist())
    replica.push()
    return set(keys.tolist())


async def assert_nothing_leaked(server: RouterServer) -> None:
    """No load, prompt, waiter or stream is left, as soon as everything in progress has noticed its end."""

    def left() -> list[object]:
        groups = server.members.groups()
        found: list[object] = [server.in_flight, len(server.members.leased())]
        for group in groups:
            found += [len(group.turnstile), len(group.fleet.inflight), len(group.gather)]
            found += [
                float(group.fleet.column(name).sum()) for name in ("leased_sequences", "leased_prefill")
            ]
        return found

    try:
        await eventually(lambda: not any(left()))
    except TimeoutError:
        raise AssertionError(f"left behind: {left()}") from None


@dataclass
class Stack:
    controller: FakeController
    replicas: list[FakeReplica]
    server: RouterServer  # the first of `servers`
    address: str
    client: KvorumClient  # of the first router
    tokenizers: list[FakeTokenizer]
    thread: threading.Thread
    servers: list[RouterServer]
    addresses: list[str]

    @property
    def group(self) -> ReplicaGroup:
        """The first router's replicas of the only model."""
        (group,) = self.server.members.groups()
        return group

    def view(self, replica: str) -> admin_pb2.ReplicaView:
        """What the first router says of a replica."""
        return next(view for view in self.server.state().replicas if view.replica == replica)

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.tokenizers[-1]

    def key(self, replica: str) -> str:
        return f"{replica}@{next(r.epoch for r in self.replicas if r.name == replica)}"

    async def announce(self) -> None:
        await self.controller.announce(*[replica.member() for replica in self.replicas])


@asynccontextmanager
async def running_stack(
    *,
    replicas: int = 1,
    extra: Sequence[FakeReplica] = (),
    script: Script | None = None,
    token: str | None = None,
    observer: Observer | None = None,
    metrics: RouterMetrics | None = None,
    routers: int = 1,
    **config: Any,
) -> AsyncIterator[Stack]:
    """Controller, replicas, router and client; ready to serve, all gone afterwards."""
    tokenizers: list[FakeTokenizer] = []

    def make_tokenizer(bundle: admin_pb2.TokenizerBundle) -> FakeTokenizer:
        tokenizers.append(FakeTokenizer(bundle))
        return tokenizers[-1]

    controller = await FakeController(token=token).start()
    fakes = [FakeReplica(f"r{i}", script=script, token=token) for i in range(replicas)] + list(extra)
    for fake in fakes:
        await fake.start()
    await controller.announce(*[fake.member() for fake in fakes])
    settings: dict[str, Any] = {"port": 0, "heartbeat_s": 0.1, **config}
    servers = [
        RouterServer(
            RouterConfig(**settings),
            controller.address,
            token,
            observer=observer,
            metrics=metrics,
            make_tokenizer=make_tokenizer,
        )
        for _ in range(routers)
    ]
    addresses = [await server.start() for server in servers]
    client = KvorumClient(addresses[0])
    stack = Stack(
        controller,
        fakes,
        servers[0],
        addresses[0],
        client,
        tokenizers,
        threading.current_thread(),
        servers,
        addresses,
    )
    try:
        names = {fake.model.name for fake in fakes}
        await eventually(
            lambda: all(
                server.members.counts(n)[0] == sum(f.model.name == n for f in fakes)
                and server.members.servable(n)
                for n in names
                for server in servers
            )
        )
        yield stack
    finally:
        await client.close()
        for server in servers:
            await server.stop(grace_s=0.2)
        for fake in fakes:
            await fake.die()
        await controller.stop()


async def refused(work: Any) -> KvorumError:
    with pytest.raises(KvorumError) as caught:
        await work
    return caught.value


def started(client: KvorumClient, *args: Any, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(collected(client, *args, **fields))


def small(name: str, sequences: int, script: Script) -> FakeReplica:
    """A replica whose engine batches so many sequences."""
    replica = FakeReplica(name, script=script)
    replica.load.max_sequences = sequences
    return replica


class SpanRecorder:
    """A tracing observer whose finished spans can be looked at."""

    def __init__(self, **config: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(TelemetryConfig(**config), provider, {}, Meters.silent())
        self.observer = TracingObserver(self.telemetry)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def request(self) -> ReadableSpan:
        (span,) = self.named(spans.ROUTER_REQUEST)
        return span

    def attributes(self, name: str) -> Mapping[str, Any]:
        """Of the last span of that name."""
        found = self.named(name)[-1].attributes
        assert found is not None
        return found
