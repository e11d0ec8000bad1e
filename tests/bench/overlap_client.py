"""Measures one running cluster for `tests.bench.overlap`: stock and overlapped by turns, on the same replica.

Runs on a host of the cluster, as a gRPC client of its router; the shards' own clocks say where time went.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import rayhost
from cluster.state import ClusterState
from router.client import KvorumClient

DECODE_STREAMS, DECODE_TOKENS = 8, 32
_WARM_UP_TOKENS = 1024
_VOCAB = (1000, 40_000)
_ANSWER_S = 300.0


class Replica:
    """The one replica of the cluster, and its shards, by Ray handles."""

    def __init__(self, state: ClusterState) -> None:
        if state.owns_ray:
            rayhost.enter(state.work_dir, state.ray_address)
        import ray

        ray.init(
            address=state.ray_address, namespace=state.namespace, log_to_driver=False, logging_level="error"
        )
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        [actor] = [name for name in names if "-epoch-" in name]
        self._actor = ray.get_actor(actor)
        shards = sorted(name for name in names if "-shard-" in name)
        self._shards = [ray.get_actor(name) for name in shards]
        self._ray = ray

    def set(self, mode: str) -> None:
        self._ray.get(self._actor.set_overlap.remote(mode), timeout=_ANSWER_S)

    def bypass(self, on: bool) -> None:
        self._ray.get(self._actor.bypass_overlap.remote(on), timeout=_ANSWER_S)

    def plan(self) -> str:
        return str(self._ray.get(self._actor.plan_overlap.remote(), timeout=_ANSWER_S))

    def reports(self) -> list[Any]:
        return list(self._ray.get([shard.overlap.remote() for shard in self._shards], timeout=_ANSWER_S))


class Turns:
    """Requests of fresh random prompts, so that no prefix is cached."""

    def __init__(self, replica: Replica, client: KvorumClient) -> None:
        self._replica, self._client = replica, client
        self._random = random.Random()  # of no seed: a later run must not find an earlier one's prefixes

    async def prefill(self, mode: str, tokens: int) -> dict[str, float]:
        """Seconds of one prompt alone: to its first token, and in the shards' forward passes and AllReduces.

        Ranks wait for each other, so a rank's own waiting holds what the slower one still computed: the
        least waiting of all ranks is the link's.
        """
        self._replica.set(mode)
        before = self._replica.reports()
        prompt = self._prompt(tokens)
        idle_s, started = _idle_s(), time.perf_counter()
        async for _message in self._client.generate(prompt, temperature=0, max_tokens=1, ignore_eos=True):
            break
        ttft_s = time.perf_counter() - started
        idle_s = _idle_s() - idle_s
        await asyncio.sleep(0.05)  # until the step's end has been counted
        spent = [_spent(a, b) for a, b in zip(before, self._replica.reports(), strict=True)]
        return {
            "ttft_s": ttft_s,
            "idle_share": min(1.0, idle_s / (ttft_s * (os.cpu_count() or 1))),
            "forward_s": max(one["forward_s"] for one in spent),
            "exposed_s": min(one["exposed_s"] for one in spent),
            "split": spent[0]["split"],
        }

    async def decode(self, mode: str) -> float:
        """Seconds per token of streams that decode together: overlap on, or Kvorum's code bypassed."""
        self._replica.bypass(mode == "bare")

        async def one() -> list[float]:
            times = []
            async for _message in self._client.generate(
                self._prompt(16), temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True
            ):
                times.append(time.perf_counter())
            return times

        streams = await asyncio.gather(*(one() for _ in range(DECODE_STREAMS)))
        return statistics.median((times[-1] - times[0]) / (DECODE_TOKENS - 1) for times in streams)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(*_VOCAB) for _ in range(tokens)]


def _idle_s() -> float:
    """Seconds that the machine's cores had nothing to do since it started, summed; counted in 10 ms.

    The machine's, also on an emulated host: all of them share its cores.
    """
    total, _, _ = Path("/proc/stat").read_text().partition("\n")
    ticks = [int(field) for field in total.split()[1:]]
    return (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle and iowait, see proc(5)


def _spent(before: Any, after: Any) -> dict[str, float]:
    found = dict.fromkeys(("forward_s", "exposed_s"), 0.0)
    for path in ("stock", "overlapped"):
        for name in found:
            found[name] += getattr(getattr(after, path), name) - getattr(getattr(before, path), name)
    found["split"] = after.overlapped.steps - before.overlapped.steps
    return found


async def measure(state: ClusterState, sizes: Sequence[int], pairs: int, decodes: int) -> dict[str, Any]:
    replica = Replica(state)
    replica.set("auto")
    said = replica.plan()
    print(f"plan: {said}", file=sys.stderr, flush=True)
    prefill: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    decode: list[dict[str, float]] = []
    async with KvorumClient(*state.router_addresses) as client:
        turns = Turns(replica, client)
        for number in range(-1, pairs):  # the first warms both paths up
            order = ("off", "auto") if number % 2 else ("auto", "off")
            for size in sizes if number >= 0 else (_WARM_UP_TOKENS,):
                pair = {mode: await turns.prefill(mode, size) for mode in order}
                if number >= 0:
                    prefill[size].append(pair)
            print(f"pair {number + 1} of {pairs} done", file=sys.stderr, flush=True)
        for number in range(-1, decodes):
            order = ("bare", "auto") if number % 2 else ("auto", "bare")
            taken = {mode: await turns.decode(mode) for mode in order}
            if number >= 0:
                decode.append(taken)
    replica.bypass(False)
    replica.set("auto")
    report = replica.reports()[0]
    return {
        "plan": asdict(report.plan),
        "path": report.path,
        "reason": report.reason,
        "prefill": prefill,
        "decode": decode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the cluster")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="prompt lengths, tokens")
    parser.add_argument("--pairs", type=int, default=7, help="turns of each side a length")
    parser.add_argument("--decodes", type=int, default=5, help="decode turns of each side")
    given = parser.parse_args()
    path = Path(os.environ["KVORUM_STATE_DIR"], f"{given.name}.json")
    state = ClusterState.model_validate_json(path.read_text())
    print(json.dumps(asyncio.run(measure(state, given.sizes, given.pairs, given.decodes))))


if __name__ == "__main__":
    main()
