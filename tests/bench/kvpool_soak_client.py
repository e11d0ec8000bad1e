"""Asks a running cluster for the mix of `kvpool_soak_requests`, for `tests.bench.kvpool_soak`.

Runs on a host of the cluster. Reads prompts and right answers from the first line of its standard input, then
commands, one a line: `pause` (begin nothing new), `go`, `end` (when all requests have been sent). Without
`end` it goes on beyond them. Tells stderr a JSON line twice a second, and stdout all answers in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from cluster.adminclient import AdminClient
from cluster.state import ClusterState
from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from tests.bench.kvpool_soak_answers import Answer
from tests.bench.kvpool_soak_requests import Request, differing, request

GRACE_S = 10.0
"""After its deadline, for a request to end."""
_TELL_S, _LOOK_S, _STATUS_S = 0.5, 1.0, 2.0
_MOST = 5
"""Times the requests, should nobody say `end`."""

Came = dict[int, list[tuple[int, float]]]
"""Tokens and their logprobs, by sequence."""


class Asking:
    """All requests, a number at a time."""

    def __init__(self, client: KvorumClient, known: dict[str, Any], seed: int, requests: int) -> None:
        self._client = client
        self._prompts: list[list[int]] = known["prompts"]
        self._right: list[list[int]] = known["answers"]
        self._logprobs: list[list[float]] = known["logprobs"]
        self._seed = seed
        self._requests = requests
        self._next = 0
        self._may = asyncio.Event()
        self._may.set()
        self._enough = False
        self.in_flight = 0
        self.answers: list[Answer] = []

    def told(self, command: str) -> None:
        """One of `pause`, `go`, `end`."""
        if command == "pause":
            self._may.clear()
        elif command in {"go", "end"}:
            self._enough = self._enough or command == "end"
            self._may.set()

    async def lane(self) -> None:
        """One request after another."""
        while True:
            await self._may.wait()
            if self._next >= self._requests * (1 if self._enough else _MOST):
                return
            asked = request(self._seed, self._next, len(self._prompts))
            self._next += 1
            self.in_flight += 1
            try:
                self.answers.append(await self._ask(asked))
            finally:
                self.in_flight -= 1

    async def _ask(self, asked: Request) -> Answer:
        answer = Answer(asked.number, asked.kind, time.time())
        came: Came = {index: [] for index in range(asked.n)}
        try:
            async with asyncio.timeout(asked.deadline_s + GRACE_S):
                answer.end = await self._read(asked, answer, came)
        except TimeoutError:
            answer.end = "hung"
        except KvorumError as error:
            answer.end, answer.code = "error", error.code.name
            answer.reason, answer.said = common_pb2.Reason.Name(error.reason), error.message[:300]
        answer.ended = time.time()
        answer.tokens = sum(map(len, came.values()))
        right = self._right[asked.prompt][: asked.tokens]
        told = []
        for index, got in came.items():
            if what := differing([token for token, _ in got], right, answer.end == "whole"):
                told.append(f"sequence {index}: {what}")
            off = zip(got, self._logprobs[asked.prompt], strict=False)
            answer.off = max([answer.off, *(abs(logprob - right) for (_, logprob), right in off)])
        if asked.kind == "once" and answer.attempt == 1 and answer.cached:
            told.append(f"{answer.cached} tokens were cached under a salt that nobody had used")
        answer.wrong = "; ".join(told) and f"prompt {asked.prompt}, {'; '.join(told)}; got {came}"
        return answer

    async def _read(self, asked: Request, answer: Answer, came: Came) -> str:
        """Returns how it ended. Raises KvorumError."""
        prompt = self._prompts[asked.prompt]
        stream = self._client.generate(prompt, timeout=asked.deadline_s, **asked.fields)
        async with aclosing(stream):
            async for message in stream:
                for choice in message.choices:
                    logprobs = (each.tokens[0].logprob for each in choice.logprobs)
                    came.setdefault(choice.index, []).extend(zip(choice.token_ids, logprobs, strict=True))
                if message.HasField("served"):
                    answer.replica, answer.attempt = message.served.replica, message.served.attempt
                answer.cached = max(answer.cached, message.usage.cached_tokens)
                answer.pooled = max(answer.pooled, message.usage.pooled_tokens)
                if message.HasField("kv_fetch"):
                    fetch = message.kv_fetch
                    answer.asked_agent, answer.pulled, answer.not_pulled = (
                        fetch.agent,
                        fetch.blocks,
                        fetch.failed,
                    )
                if asked.leave_after and len(came[0]) >= asked.leave_after:
                    return "cancelled"
        return "whole"


class Cluster:
    """What its controller says of it, again and again."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.seen: dict[str, Any] = {}

    async def watch(self) -> None:
        with AdminClient(self._state.admin_address, self._state.token) as admin:
            while True:
                with suppress(KvorumError):
                    self.seen = _plain(await asyncio.to_thread(admin.status, _STATUS_S))
                await asyncio.sleep(_LOOK_S)


def _plain(status: admin_pb2.ClusterStatus) -> dict[str, Any]:
    replicas = [
        {
            "replica": replica.replica,
            "epoch": replica.epoch,
            "state": admin_pb2.ReplicaState.Name(replica.state),
            "node": replica.node,
            "core_pid": replica.engine_core_pid,
            "shard_pids": [shard.pid for shard in replica.shards],
            "sequences": replica.load.sequences,
            "restarts": replica.restarts,
        }
        for replica in status.replicas
    ]
    agents = [
        {"node": pool.node, "pid": pool.pid, "agent": pool.agent, "silence": pool.silence}
        for pool in status.kv_pools
    ]
    return {"asked_at": time.time(), "replicas": replicas, "agents": agents}


async def _tell(asking: Asking, cluster: Cluster) -> None:
    while True:
        told = {"done": len(asking.answers), "in_flight": asking.in_flight, **cluster.seen}
        print(json.dumps(told), file=sys.stderr, flush=True)
        await asyncio.sleep(_TELL_S)


def _listen(loop: asyncio.AbstractEventLoop, told: Callable[[str], None]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(told, line.strip())
    loop.call_soon_threadsafe(told, "end")  # nobody is there any more to say it


async def run(
    state: ClusterState, known: dict[str, Any], seed: int, requests: int, lanes: int
) -> Sequence[Answer]:
    """All answers."""
    async with KvorumClient(*state.router_addresses) as client:
        asking, cluster = Asking(client, known, seed, requests), Cluster(state)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_listen, args=(loop, asking.told), daemon=True).start()
        beside = [asyncio.create_task(cluster.watch()), asyncio.create_task(_tell(asking, cluster))]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(asking.lane())
        finally:
            for task in beside:
                task.cancel()
        return asking.answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the cluster")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--lanes", type=int, required=True, help="requests at a time")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    path = Path(os.environ["KVORUM_STATE_DIR"], f"{given.name}.json")
    state = ClusterState.model_validate_json(path.read_text())
    known = json.loads(sys.stdin.readline())
    answers = asyncio.run(run(state, known, given.seed, given.requests, given.lanes))
    print(json.dumps([answer.to_list() for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
