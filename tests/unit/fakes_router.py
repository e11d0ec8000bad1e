"""A whole router in front of fake replicas, as the tests of its behaviour want it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fakes_cluster import FakeController, FakeReplica, Script
from fakes_tokenizer import FakeTokenizer

from protos import admin_pb2
from router.client import KvorumClient
from router.config import RouterConfig
from router.observe import Observer
from router.server import RouterServer


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `holds` does; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 (what it looks at has no event)
            await asyncio.sleep(0.005)


@dataclass
class Stack:
    controller: FakeController
    replicas: list[FakeReplica]
    server: RouterServer
    address: str
    client: KvorumClient
    tokenizers: list[FakeTokenizer]
    thread: threading.Thread

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
    server = RouterServer(
        RouterConfig(**settings), controller.address, token, observer=observer, make_tokenizer=make_tokenizer
    )
    address = await server.start()
    client = KvorumClient(address)
    stack = Stack(controller, fakes, server, address, client, tokenizers, threading.current_thread())
    try:
        names = {fake.model.name for fake in fakes}
        await eventually(
            lambda: (
                all(server.members.counts(n)[0] == sum(f.model.name == n for f in fakes) for n in names)
                and all(server.members.servable(n) for n in names)
            )
        )
        yield stack
    finally:
        await client.close()
        await server.stop(grace_s=0.2)
        for fake in fakes:
            await fake.die()
        await controller.stop()
