"""Real clusters for the end-to-end tests: started by the command line, one at a time, stopped by handle."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster import processes
from cluster.state import ClusterState
from protos import common_pb2
from router.client import KvorumClient
from telemetry.record import StoredSpan
from telemetry.store import SpanStore
from tests.e2e.http_cases import FRONT_FLAGS
from tests.e2e.router_state import router_state

UP_TIMEOUT_S = 400
KVORUM = [sys.executable, "-m", "cluster.cli"]


@dataclass
class RunningCluster:
    """A cluster that `kvorum up --detach` started in a state folder of its own."""

    name: str
    environ: dict[str, str]
    state: ClusterState = field(init=False)

    def cli(self, *arguments: str, timeout: float = 60, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `kvorum ARGUMENTS` as a user of this cluster would."""
        return subprocess.run(
            [*KVORUM, *arguments],
            env=self.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def up(self, *flags: str) -> None:
        """Start it, or fail with what it printed."""
        ports = ("--port", "0", "--viewer-port", "0")
        done = self.cli("up", "--name", self.name, "--detach", *ports, *flags, timeout=UP_TIMEOUT_S)
        assert done.returncode == 0, f"up failed:\n{done.stdout}\n{done.stderr}"
        path = Path(self.environ["KVORUM_STATE_DIR"], f"{self.name}.json")
        self.state = ClusterState.model_validate_json(path.read_text())

    def down(self) -> None:
        """Stop it and insist that nothing is left."""
        done = self.cli("down", "--name", self.name, "--grace", "2", timeout=90)
        assert done.returncode == 0, f"down failed:\n{done.stdout}\n{done.stderr}"
        assert processes.leftovers(self.state.id) == []

    def status(self) -> dict[str, Any]:
        """What `kvorum status --json` prints."""
        done = self.cli("status", "--name", self.name, "--json")
        assert done.returncode == 0, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def client(self) -> KvorumClient:
        """A gRPC client of its router."""
        return KvorumClient(*self.state.router_addresses)

    @property
    def http_url(self) -> str:
        """Base URL of its HTTP face, without /v1."""
        assert self.state.http_url, "it has no HTTP face"
        return self.state.http_url

    def leases(self) -> int:
        """Requests that any of its routers holds a lease for."""
        return sum(router_state(address, self.state.token).leases for address in self.state.router_addresses)

    async def trace(self, trace_id: str, names: set[str]) -> dict[str, StoredSpan]:
        """The spans of a trace by name, once all of these are in the store."""
        assert self.state.span_store is not None
        store = SpanStore(self.state.span_store)
        for _ in range(60):
            found = {span.name: span for span in store.trace(trace_id)}
            if names <= found.keys():
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"trace {trace_id} has only {sorted(found)}")

    def wait(
        self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 150
    ) -> dict[str, Any]:
        """Poll the status until the condition holds; while a controller restarts there is none."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            done = self.cli("status", "--name", self.name, "--json")
            if done.returncode == 0 and condition(shown := json.loads(done.stdout)):
                return dict(shown)
            time.sleep(0.3)
        raise AssertionError(f"no {what} within {timeout_s} s; last: {done.stdout[:3000]} {done.stderr}")


@dataclass
class ClusterSlot:
    """At most one cluster runs; tests that need the same flags share it."""

    folder: Path
    _running: RunningCluster | None = None
    _flags: tuple[str, ...] = ()

    def get(self, *flags: str) -> RunningCluster:
        if self._running is not None and flags == self._flags:
            return self._running
        self.clear()
        environ = dict(os.environ) | {
            "KVORUM_STATE_DIR": str(self.folder),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "HF_HUB_OFFLINE": "1",
        }
        started = RunningCluster(f"test-{os.getpid()}", environ)
        started.up(*flags)
        self._running, self._flags = started, flags
        return started

    def clear(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.down()


@pytest.fixture(scope="session")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSlot]:
    held = ClusterSlot(tmp_path_factory.mktemp("state"))
    yield held
    held.clear()


@pytest.fixture
def pair(slot: ClusterSlot) -> RunningCluster:
    """Two TP=1 replicas in float32, so that greedy tokens do not depend on what is batched together."""
    return slot.get("--no-http", "--replicas", "2", "--dtype", "float32", "--max-model-len", "4096")


@pytest.fixture
def split(slot: ClusterSlot) -> RunningCluster:
    """One replica of two tensor-parallel shards, on the padded checkpoint."""
    shape = ["--replicas", "1", "--tensor-parallel-size", "2", "--max-model-len", "4096"]
    return slot.get("--no-http", "--dtype", "float32", *shape)


def web_of(slot: ClusterSlot) -> RunningCluster:
    """As `pair`, with the HTTP face, and with the flags of vLLM's front end that the HTTP tests need."""
    front = [f"--http-argument={flag}" for flag in FRONT_FLAGS]
    flags = ["--replicas", "2", "--dtype", "float32", "--max-model-len", "4096", "--http-port", "0"]
    return slot.get(*flags, *front)


@pytest.fixture
def web(slot: ClusterSlot) -> RunningCluster:
    return web_of(slot)


@pytest.fixture
async def client_of_web(web: RunningCluster) -> AsyncIterator[KvorumClient]:
    async with web.client() as opened:
        yield opened


@pytest.fixture
async def client(pair: RunningCluster) -> AsyncIterator[KvorumClient]:
    async with pair.client() as opened:
        yield opened


def idle(shown: dict[str, Any]) -> bool:
    """Whether a status says that no engine has a request."""
    loads = [replica.get("load", {}) for replica in shown["replicas"]]
    return all(int(load.get("running", 0)) == 0 and int(load.get("waiting", 0)) == 0 for load in loads)


@dataclass
class Answer:
    """A whole stream, put together."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    messages: list[common_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def served(self) -> common_pb2.Served:
        return self.messages[0].served

    @property
    def usage(self) -> common_pb2.Usage:
        return self.messages[-1].usage


async def collect(client: KvorumClient, prompt: Any = None, **arguments: Any) -> Answer:
    """Run one request to its end."""
    answer = Answer()
    async for message in client.generate(prompt, **arguments):
        answer.messages.append(message)
        for choice in message.choices:
            answer.texts[choice.index] = answer.texts.get(choice.index, "") + choice.text
            answer.tokens.setdefault(choice.index, []).extend(choice.token_ids)
            if choice.finish_reason:
                answer.finish[choice.index] = choice.finish_reason
    return answer
