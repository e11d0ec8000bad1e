"""Hosts with an arena and an agent, peers that follow a script, and agents in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers_kvpool import NAMESPACE, RANKS, content, key, make, store

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bearer, bind, create_server, open_channel
from workers.kvpool.admission import Policy
from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.agent_observer import AgentObserver
from workers.kvpool.arena import Arena
from workers.kvpool.checksum import checksum
from workers.kvpool.header import file_name
from workers.kvpool.layout import Geometry
from workers.kvpool.transport import pack_names
from workers.kvpool.wire import Block, Part, messages

TOKEN = "cluster-token"
DIGEST = file_name(NAMESPACE).removesuffix(".arena")
LONG_S = 30.0
"""A deadline that no test waits for."""


def name(number: int) -> int:
    """The router's key of `key(number)`, as `helpers_kvpool.store` gives it."""
    return int.from_bytes(key(number)[:8], "little")


def names(numbers: Iterable[int]) -> list[int]:
    return [name(number) for number in numbers]


def block(number: int, index: int) -> Block:
    """As its host sends it."""
    parts = [content(key(number), rank) for rank in range(RANKS)]
    return Block(index, key(number), [Part([part], checksum(part)) for part in parts])


def spoiled(number: int, index: int) -> Block:
    """With a bit flipped on the way."""
    true = block(number, index)
    last = true.parts[-1]
    data = bytes([last.pieces[0][0] ^ 1]) + last.pieces[0][1:]
    return true._replace(parts=[*true.parts[:-1], Part([data], last.checksum)])


def arena_in(folder: Path, slots: int = 64, blocks: Iterable[int] = (), policy: Policy = Policy.LRU) -> Arena:
    """An engine's view of a host's arena, which holds these blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    arena = make(folder / f"{DIGEST}.arena", slots, policy, changes=256)
    wanted = [key(number) for number in blocks]
    assert store(arena, wanted) == wanted
    return arena


@dataclass
class Host:
    arena: Arena
    agent: KvAgent
    address: str

    async def pull(self, source: str, numbers: Iterable[int], **more: Any) -> kvpool_pb2.PullResponse:
        return await pull_from(self.address, source, numbers, **more)


@asynccontextmanager
async def a_host(
    folder: Path,
    slots: int = 64,
    blocks: Iterable[int] = (),
    policy: Policy = Policy.LRU,
    observer: AgentObserver | None = None,
    **settings: Any,
) -> AsyncIterator[Host]:
    """With an arena that holds these blocks, and an agent."""
    with arena_in(folder, slots, blocks, policy) as arena:
        # No time passes for those who are avoided.
        wanted = AgentSettings(folder, "127.0.0.1", **settings)
        agent = KvAgent(wanted, TOKEN, clock=lambda: 100.0, observer=observer)
        address = await agent.start()
        try:
            yield Host(arena, agent, address)
        finally:
            await agent.stop()
            assert arena.check() == []
            assert [owner.kind.name for owner in arena.usage().owners] == ["ENGINE"]  # the agent has left


async def pull_from(
    address: str, source: str, numbers: Iterable[int], timeout_s: float = LONG_S, token: str = TOKEN
) -> kvpool_pb2.PullResponse:
    """As a replica of the agent's own host asks it."""
    request = kvpool_pb2.PullRequest(
        namespace=DIGEST, source=source, router_keys=pack_names(names(numbers)), timeout_s=timeout_s
    )
    async with open_channel(address) as channel:
        stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)
        answer: kvpool_pb2.PullResponse = await stub.Pull(
            request, metadata=bearer(token), timeout=timeout_s + LONG_S
        )
        return answer


async def read(
    address: str, numbers: Iterable[int], namespace: str = DIGEST, timeout_s: float | None = LONG_S
) -> list[kvpool_pb2.BlockChunk]:
    """As another host's agent asks for them."""
    request = kvpool_pb2.ReadRequest(namespace=namespace, router_keys=pack_names(names(numbers)))
    async with open_channel(address) as channel:
        stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)
        return [chunk async for chunk in stub.Read(request, metadata=bearer(TOKEN), timeout=timeout_s)]


Script = Callable[[kvpool_pb2.ReadRequest], AsyncIterator[Block | kvpool_pb2.BlockChunk]]


@asynccontextmanager
async def a_peer(script: Script) -> AsyncIterator[str]:
    """The address of an agent that sends what the script says."""

    class Peer(kvpool_pb2_grpc.KvAgentServicer):
        async def Read(self, request: Any, context: Any) -> Any:  # noqa: N802
            async for sent in script(request):
                for message in messages(sent) if isinstance(sent, Block) else [sent]:
                    yield message

        async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
            raise NotImplementedError

        async def DescribeAgent(self, request: Any, context: Any) -> Any:  # noqa: N802
            raise NotImplementedError

    server = create_server(tokens=[TOKEN])
    kvpool_pb2_grpc.add_KvAgentServicer_to_server(Peer(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass
class ScriptedTransport:
    """Gives the blocks whose numbers it has, one whenever `go` lets it."""

    numbers: dict[int, int]
    """Block numbers by the router's keys."""
    go: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 20))
    asked: list[tuple[str, list[int]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    error: Exception | None = None
    """At the end, instead of an end."""

    @classmethod
    def of(cls, numbers: Iterable[int], **more: Any) -> ScriptedTransport:
        return cls({name(number): number for number in numbers}, **more)

    async def read(
        self, source: str, namespace: str, wanted: Sequence[int], shape: Geometry, timeout_s: float
    ) -> AsyncGenerator[Block, None]:
        self.asked.append((source, list(wanted)))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            for index, one in enumerate(wanted):
                await self.go.acquire()
                if one not in self.numbers:
                    break
                yield block(self.numbers[one], index)
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it does; fail when it does not in time."""
    async with asyncio.timeout(LONG_S):
        while not holds():  # noqa: ASYNC110 (what it looks at has no event)
            await asyncio.sleep(0.005)


class AgentProcess:
    """An agent in a process of its own. `what`: see `helpers_kvagent_child`."""

    def __init__(self, folder: Path, what: str = "serve", **more: Any) -> None:
        here = Path(__file__).parent
        paths = os.pathsep.join([str(here), str(here.parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, str(here / "helpers_kvagent_child.py"), json.dumps([str(folder), what, more])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.address = self.line()

    def line(self, timeout_s: float = 60.0) -> str:
        """The next one that it prints."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], timeout_s)[0], "the agent says nothing"
        return self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """At once; returns when it is gone."""
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


async def until_ready(arena: Arena, *numbers: int) -> None:
    await eventually(lambda: set(ready_numbers(arena, numbers)) == set(numbers))


def ready_numbers(arena: Arena, numbers: Iterable[int]) -> Iterator[int]:
    """Those of these blocks that are ready."""
    held = set(arena.snapshot().keys)
    return (number for number in numbers if key(number) in held)
