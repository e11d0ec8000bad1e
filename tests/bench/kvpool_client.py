"""Measures one running cluster of two replicas for `tests.bench.kvpool`, past the router: replica by replica.

Runs on a host of the cluster. Each prompt is new and random: computed at the first replica, then asked at the
second, which finds it in the pool (of its host, or of the other's, by way of the agents), then asked there
again, which finds it in its own cache; and another one of the same length is computed there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cluster.adminclient import AdminClient
from cluster.state import ClusterState
from protos import admin_pb2, blockkeys, common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bearer, open_channel

STORED_WITHIN_S = 20.0
RESTARTED_WITHIN_S = 180.0
RESTART_PROMPTS, RESTART_TOKENS = 4, 2000
_VOCAB = (1000, 40_000)
_ANSWER_S, _LOOK_S = 120.0, 10.0


class Replica:
    """One replica, asked directly."""

    def __init__(self, status: admin_pb2.ReplicaStatus, token: str) -> None:
        self.status = status
        self._credential = bearer(token)
        self._channel = open_channel(status.address)
        self._stub: replica_pb2_grpc.ReplicaAsyncStub = replica_pb2_grpc.ReplicaStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def look(self) -> replica_pb2.ReplicaUpdate:
        """What it tells of itself."""
        asked = replica_pb2.WatchReplicaRequest()
        call = self._stub.WatchReplica(asked, metadata=self._credential, timeout=_LOOK_S)
        async for update in call:
            call.cancel()
            return update
        raise RuntimeError(f"{self.status.replica} tells nothing of itself")

    async def pools(self, keys: npt.NDArray[np.uint64]) -> bool:
        """Whether all these blocks are in the pool of its host, as it tells routers."""
        update = await self.look()
        told = [change.stored for change in update.blocks if change.tier == replica_pb2.HOST]
        return bool(np.isin(keys, np.frombuffer(b"".join(told), "<u8")).all())

    async def ask(self, prompt: Sequence[int], source: replica_pb2.KvSource | None = None) -> _Answer:
        """One token of greedy decoding."""
        wire = replica_pb2.ReplicaGenerateRequest(
            request_id=f"bench-{random.getrandbits(64):016x}",
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            kv_source=source,
        )
        began, ttft_s = time.perf_counter(), 0.0
        found, fetch = 0, common_pb2.KvFetch()
        call = self._stub.Generate(wire, metadata=self._credential, timeout=_ANSWER_S)
        async for message in call:
            ttft_s = ttft_s or time.perf_counter() - began
            found = max(found, message.usage.cached_tokens)
            if message.HasField("kv_fetch"):
                fetch = message.kv_fetch
        return _Answer(ttft_s, found, fetch)


class _Answer:
    def __init__(self, ttft_s: float, found: int, fetch: common_pb2.KvFetch) -> None:
        self.ttft_s, self.found, self.fetch = ttft_s, found, fetch

    def expect(self, what: str, least: float, most: float = float("inf")) -> float:
        """Its TTFT, when as many tokens were found as the name of the figure says."""
        if not least <= self.found <= most:
            why = f" ({self.fetch.failed})" if self.fetch.failed else ""
            raise RuntimeError(f"{what}: {self.found} tokens were found, not {least:.0f} to {most:.0f}{why}")
        return self.ttft_s


class Turns:
    """The prompts of a run, which no earlier run may have left in a pool."""

    def __init__(self, first: Replica, second: Replica, told: replica_pb2.ReplicaUpdate, source: str) -> None:
        """`told`: by either; `source`: the agent of the first replica's host, where that is another."""
        self._first, self._second, self._agent = first, second, source
        self._block = told.load.block_size
        self._root = blockkeys.root(told.snapshot.model.revision, "", "")
        self._random = random.Random()

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(*_VOCAB) for _ in range(tokens)]

    async def store(self, tokens: int) -> tuple[list[int], float]:
        """A new prompt, computed at the first replica; and its TTFT there. Returns when the pool has it."""
        prompt = self.prompt(tokens)
        keys = blockkeys.keys(np.array(prompt), self._block, self._root)
        ttft_s = (await self._first.ask(prompt)).expect("a new prompt", 0, 0)
        until = time.monotonic() + STORED_WITHIN_S
        while not await self._first.pools(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"{tokens} tokens were not in the pool within {STORED_WITHIN_S:.0f} s")
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.3)
        return prompt, ttft_s

    async def turn(self, tokens: int) -> dict[str, float]:
        """Seconds to the first token of one prompt, by where its blocks were."""
        prompt, first_s = await self.store(tokens)
        source = (
            replica_pb2.KvSource(agent=self._agent, blocks=tokens // self._block) if self._agent else None
        )
        least = tokens - 2 * self._block
        pooled = (await self._second.ask(prompt, source if self._agent else None)).expect(
            "a pooled prompt", least
        )
        local = (await self._second.ask(prompt)).expect("a local prompt", least)
        computed = (await self._second.ask(self.prompt(tokens))).expect("a new prompt", 0, 0)
        return {"first": first_s, "pooled": pooled, "local": local, "computed": computed}


async def measure(state: ClusterState, sizes: Sequence[int], turns: int, *, restart: bool) -> dict[str, Any]:
    """TTFTs in seconds, by length; and after the second replica has been killed and come back."""
    with AdminClient(state.admin_address, state.token) as admin:
        first, second = sorted(admin.status().replicas, key=lambda replica: replica.replica)
        found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
        async with Replica(first, state.token) as a, Replica(second, state.token) as b:
            told = [await replica.look() for replica in (a, b)]
            pools, block = [update.snapshot.pool for update in told], told[0].load.block_size
            apart = pools[0].arena != pools[1].arena
            asked = Turns(a, b, told[0], pools[0].agent if apart else "")
            for number in range(-1, turns):  # the first warms all paths up
                for size in sizes:
                    taken = await asked.turn(size)
                    if number >= 0:
                        found[size].append(taken)
                print(f"turn {number + 1} of {turns} done", file=sys.stderr, flush=True)
            stored = [await asked.store(RESTART_TOKENS) for _ in range(RESTART_PROMPTS if restart else 0)]
        restarted = await _after_restart(admin, second, state.token, [prompt for prompt, _ in stored], block)
    return {"apart": apart, "block_bytes": pools[0].block_bytes, "found": found, "restarted": restarted}


async def _after_restart(
    admin: AdminClient,
    killed: admin_pb2.ReplicaStatus,
    token: str,
    prompts: Sequence[Sequence[int]],
    block: int,
) -> list[float]:
    """TTFTs at the replica's next epoch, whose own cache is empty, of prompts that the pool has."""
    if not prompts:
        return []
    os.kill(killed.engine_core_pid, signal.SIGKILL)
    until = time.monotonic() + RESTARTED_WITHIN_S
    while True:
        [now] = [r for r in admin.status().replicas if r.replica == killed.replica]
        if now.state == admin_pb2.READY and now.epoch != killed.epoch:
            break
        if time.monotonic() > until:
            raise RuntimeError(f"{killed.replica} was not back within {RESTARTED_WITHIN_S:.0f} s")
        await asyncio.sleep(0.5)
    print(f"{killed.replica} is back", file=sys.stderr, flush=True)
    await asyncio.sleep(3.0)
    least = RESTART_TOKENS - 2 * block
    async with Replica(now, token) as replica:
        return [(await replica.ask(prompt)).expect("a prompt from before", least) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the cluster")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="prompt lengths, tokens")
    parser.add_argument("--turns", type=int, default=5, help="prompts of each length")
    parser.add_argument("--restart", action="store_true", help="kill the second replica in the end")
    given = parser.parse_args()
    path = Path(os.environ["KVORUM_STATE_DIR"], f"{given.name}.json")
    state = ClusterState.model_validate_json(path.read_text())
    print(json.dumps(asyncio.run(measure(state, given.sizes, given.turns, restart=given.restart))))


if __name__ == "__main__":
    main()
