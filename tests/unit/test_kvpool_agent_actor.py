"""The agent in its actor, without Ray: it listens at once, and takes the pool along at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_kvagent import TOKEN, arena_in, eventually, read
from helpers_kvpool import RANKS

from protos import kvpool_pb2
from workers.kvpool import agent_actor
from workers.kvpool.agent_actor import AgentSpec, KvAgentActor


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interval = sys.getswitchinterval()
    monkeypatch.setattr(agent_actor.os, "nice", lambda _increment: 0)
    monkeypatch.setattr(agent_actor, "configure_logging", lambda *_, **__: None)
    yield
    sys.setswitchinterval(interval)


def spec(folder: Path) -> AgentSpec:
    return AgentSpec("node", "127.0.0.1", "blue", str(folder), (), "text", TOKEN)


async def test_it_serves_from_its_creation_on_and_ends_with_the_pool(tmp_path: Path) -> None:
    folder = tmp_path / "kvorum-blue"
    with arena_in(folder, blocks=range(3)):
        actor = KvAgentActor(spec(folder))
        info = await actor.ready()
        assert (info.pid, info.node_id, info.host) == (os.getpid(), "node", "127.0.0.1")
        assert len(await read(info.address, range(3))) == 3 * RANKS
        report = kvpool_pb2.AgentReport.FromString(await actor.report())
        assert (report.blocks_sent, report.arenas[0].ready) == (3, 3)
        await actor.stop()
    assert not folder.exists()


async def test_the_one_that_ray_makes_after_it_listens_at_the_same_port(tmp_path: Path) -> None:
    folder = tmp_path / "kvorum-blue"
    first = KvAgentActor(spec(folder))
    address = (await first.ready()).address
    await first._agent.stop()  # as if it had been killed: the folder is left
    second = KvAgentActor(spec(folder))
    assert (await second.ready()).address == address
    await second.stop()


async def test_it_says_why_it_cannot_start_and_leaves_the_rest_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_actor, "_LAST_WORDS_S", 0.0)
    ended: list[int] = []
    monkeypatch.setattr(agent_actor.os, "_exit", ended.append)
    (tmp_path / "file").touch()
    actor = KvAgentActor(spec(tmp_path / "file" / "kvorum-blue"))
    with pytest.raises(OSError, match="Not a directory"):
        await actor.ready()
    await eventually(lambda: ended == [1])
