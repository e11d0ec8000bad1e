"""What a decision costs: `make bench NAME=router`.

1. Hash, index look-up and the whole decision (`router.decide.Decider`) for 2k/32k/128k tokens and 8/64/512
   replicas, of which replica r holds the first (r + 1) / n of the prompt.
2. Intake of block events, memory per block.
3. With `ARGS="--dynamo-python PATH"`, a Python that has ai-dynamo-runtime: the same hash, look-up and events
   there, in turns with ours in one run. Its hash and look-up take Python lists, its events JSON; ours take
   NumPy arrays and packed keys. Each side is measured with what it takes.

`ARGS=--soak` instead runs 10M block events against one index and watches its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from protos import blockkeys
from router.blockhash import prompt_keys
from router.decide import Decider
from router.fleet import Fleet, LoadReport
from router.index import BlockIndex
from router.picker import RouteRequest
from router.policies import make_policy
from tests.bench.report import ROOT, report

LENGTHS = {"2k": 2048, "32k": 32_768, "128k": 131_072}
REPLICAS = (8, 64, 512)
BLOCK = 16
ROUNDS = 5
KEPT = 64  # batches that a replica holds in the events' workload
OTHERS = 500_000  # foreign blocks in an aged index
Keys = npt.NDArray[np.uint64]


class Dynamo:
    """Their side, in its own process; None of it when no Python was named."""

    def __init__(self, python: Path | None) -> None:
        self._process = None
        if python is not None:
            self._process = subprocess.Popen(
                [str(python), str(ROOT / "tests" / "bench" / "dynamo_main.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def __bool__(self) -> bool:
        return self._process is not None

    def ask(self, do: str, **arguments: int) -> Any:
        """The answer to one command; RuntimeError when the process died."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"Dynamo's side ended with {self._process.wait()} at '{do}': see its output above"
            )
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)


@dataclass
class Timings:
    """Milliseconds by round."""

    rounds: list[list[float]] = field(default_factory=list)

    def p50(self) -> float:
        """The median of the rounds' medians."""
        return statistics.median(statistics.median(each) for each in self.rounds)

    def cells(self) -> list[str]:
        if not self.rounds:
            return ["-", "-"]
        return [f"{self.p50():.3f}", f"{np.percentile(np.concatenate(self.rounds), 99):.3f}"]

    def over(self, other: Timings) -> float:
        """The median over rounds of ours / theirs: both sides of a round met the same noise."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def timed(call: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def turns(ours: Callable[[], object], theirs: Callable[[int], list[float]] | None) -> tuple[Timings, Timings]:
    """Both sides, a round each in turn; about 0.1 s a round."""
    count = max(20, min(1000, int(100 / statistics.median(timed(ours, 10)))))
    mine, other = Timings(), Timings()
    for _ in range(ROUNDS):
        mine.rounds.append(timed(ours, count))
        if theirs is not None:
            other.rounds.append(theirs(count))
    return mine, other


def fleet_of(count: int, keys: Keys, *, batch: int = 128, others: int = 0) -> Fleet:
    """Replicas with staggered depths of one prompt, and different loads; `others`: an aged index."""
    rng = np.random.default_rng(2)
    fleet = Fleet()
    fleet.block_size = BLOCK
    rows = [fleet.join(f"r{number}", "e") for number in range(count)]
    for start in range(0, others, 1000):
        fleet.index.store(rows[start // 1000 % count], rng.integers(1, 2**64, 1000, np.uint64))
    for number, row in enumerate(rows):
        fleet.set_standing(row, usable=True)
        running = int(rng.integers(0, 32))
        load = LoadReport(
            running=running,
            sequences=running,
            prefill_backlog_tokens=int(rng.integers(0, 20_000)),
            kv_usage=float(rng.random()),
            max_sequences=64,
            max_batch_tokens=8192,
            prefill_ms_per_token=0.1,
            decode_step_ms=20.0,
        )
        fleet.report(row, load, 0.0)
        depth = len(keys) * (number + 1) // count
        for start in range(0, depth, batch):
            fleet.index.store(row, keys[start : min(start + batch, depth)])
            if others:
                fleet.index.store(row, rng.integers(1, 2**64, 3, np.uint64))
    found = fleet.index.match(keys)[0][rows].tolist()
    assert found == [len(keys) * (number + 1) // count for number in range(count)], "a wrong depth was found"
    return fleet


def decisions(dynamo: Dynamo, figures: dict[str, float]) -> list[list[str]]:
    """Rows of the table for everything in a decision."""
    table: list[list[str]] = []
    rng = np.random.default_rng(1)

    def add(what: str, length: str, replicas: str, ours: Timings, theirs: Timings) -> None:
        ratio = f"{ours.over(theirs):.2f}" if theirs.rounds else "-"
        table.append([what, length, replicas, *ours.cells(), *theirs.cells(), ratio])

    for length, count in LENGTHS.items():
        tokens = rng.integers(0, 150_000, count).astype(np.int32)
        listed = tokens.tolist()
        keys = prompt_keys(tokens, BLOCK, "revision")

        def their_hash(n: int, count: int = count) -> list[float]:
            found: list[float] = dynamo.ask("hash", tokens=count, block=BLOCK, count=n)["ms"]
            return found

        hashing = turns(partial(prompt_keys, tokens, BLOCK, "revision"), their_hash if dynamo else None)
        add("hash", length, "", *hashing)
        add("list to array", length, "", *turns(partial(np.asarray, listed, np.int32), None))
        if length == "32k":
            figures["hash_p50_ms_32k"] = hashing[0].p50()
        for replicas in REPLICAS:
            for aged in (False, True) if length == "32k" else (False,):
                layout = {"batch": 16, "others": OTHERS} if aged else {"batch": 128, "others": 0}
                fleet = fleet_of(replicas, keys, **layout)
                if dynamo:
                    depths = dynamo.ask("fill", rows=replicas, blocks=len(keys), **layout)["depths"]
                    held = fleet.index.match(keys)[0]
                    assert depths == sorted(held[held > 0].tolist()), "the two sides disagree"

                def their_lookup(n: int) -> list[float]:
                    found: list[float] = dynamo.ask("lookup", count=n)["ms"]
                    return found

                lookup = turns(partial(fleet.index.match, keys), their_lookup if dynamo else None)
                add("look-up, aged index" if aged else "look-up", length, str(replicas), *lookup)
                if dynamo and length == "32k" and replicas == 64:
                    name = "aged_lookup_over_dynamo_32k_64" if aged else "lookup_over_dynamo_32k_64"
                    figures[name] = lookup[0].over(lookup[1])
                if aged:
                    continue
                decider = Decider(fleet, make_policy("predicted-time", rng=random.Random(1)))
                request = RouteRequest(
                    model="m", prompt_token_ids=tokens, revision="revision", max_tokens=128
                )
                whole = turns(partial(decider.decide, request, 0.1), None)
                add("decision", length, str(replicas), *whole)
                rest = whole[0].p50() - hashing[0].p50() - lookup[0].p50()
                table.append(["  of it cost and pick", length, str(replicas), f"{rest:.3f}", *["-"] * 4])
                if length == "32k" and replicas == 64:
                    figures["decision_p50_ms_32k_64"] = whole[0].p50()
    return table


def churn(batch: int, steps: int) -> float:
    """Seconds for so many batches stored and, later, removed: packed keys in, as they come from the wire."""
    index, rng = BlockIndex(), np.random.default_rng(3)
    held: list[deque[bytes]] = [deque() for _ in range(4)]
    packed = [rng.integers(1, 2**64, batch, np.uint64).tobytes() for _ in range(steps + 4 * KEPT)]
    for step, keys in enumerate(packed[: 4 * KEPT]):
        index.store(step % 4, np.frombuffer(keys, np.uint64))
        held[step % 4].append(keys)
    start = time.perf_counter()
    for step, keys in enumerate(packed[4 * KEPT :]):
        row = step % 4
        index.store(row, np.frombuffer(keys, np.uint64))
        held[row].append(keys)
        gone = held[row].popleft()
        index.remove(row, np.frombuffer(gone, np.uint64)[::-1])
    seconds = time.perf_counter() - start
    assert len(index) == 4 * KEPT * batch, "blocks were lost or kept"
    return seconds


def intake(dynamo: Dynamo, figures: dict[str, float]) -> list[list[str]]:
    """Rows of the table for events and memory."""
    table = []
    slowest = float("inf")
    for batch in (16, 128):
        steps = 200_000 // batch
        mine, theirs = [], []
        for _ in range(ROUNDS):
            mine.append(2 * steps * batch / churn(batch, steps))
            if dynamo:
                theirs.append(
                    2 * steps * batch / dynamo.ask("events", batch=batch, steps=steps, kept=KEPT)["seconds"]
                )
        rate = statistics.median(mine)
        slowest = min(slowest, rate)
        other = f"{statistics.median(theirs):,.0f}" if theirs else "-"
        table.append([f"events, batches of {batch}", "blocks/s", f"{rate:,.0f}", other])
    figures["event_blocks_per_s"] = slowest
    for rows in (64, 512):
        index, rng, before = BlockIndex(), np.random.default_rng(4), _rss()
        pause = 0.0
        for start in range(0, 1_000_000, 1000):
            keys = rng.integers(1, 2**64, 1000, np.uint64)
            began = time.perf_counter()
            index.store(start // 1000 % rows, keys)
            pause = max(pause, time.perf_counter() - began)
        mib = index.nbytes / 2**20
        their_mib = (
            f"{dynamo.ask('memory', blocks=1_000_000)['mib']:.0f} (RSS)" if dynamo and rows == 64 else "-"
        )
        grown = (_rss() - before) / 2**20
        table.append([f"1M blocks, {rows} rows", "MiB", f"{mib:.0f} (RSS {grown:.0f})", their_mib])
        table.append([f"  longest store of 1000, {rows} rows", "ms", f"{pause * 1e3:.0f}", "-"])
        if rows == 64:
            figures["mib_per_million_blocks"] = mib
        del index
    return table


def soak(events: int) -> None:
    """Store and remove churn over 64 rows, with rows dropped and used again; memory along the way."""
    index, rng = BlockIndex(), np.random.default_rng(5)
    stem = blockkeys.keys(np.arange(4096, dtype=np.int32), BLOCK, blockkeys.root("soak"))
    held: list[deque[Keys]] = [deque() for _ in range(64)]
    done, mark, table, resident = 0, 0, [], []
    while done < events:
        row = int(rng.integers(64))
        # Half of the prompts begin alike, so that blocks are shared and outlive single rows.
        own = rng.integers(1, 2**64, int(rng.choice([1, 16, 128])), np.uint64)
        keys = np.concatenate((stem[: int(rng.integers(1, 256))], own)) if rng.random() < 0.5 else own
        done += index.store(row, keys)
        held[row].append(keys)
        if len(held[row]) > 60:
            done += index.remove(row, held[row].popleft()[::-1])
        if rng.random() < 1e-3:
            done += index.blocks(row)
            index.clear(row)
            held[row].clear()
        if done >= mark:
            resident.append(_rss() / 2**20)
            size = f"{index.nbytes / 2**20:.1f}"
            table.append([f"{done:,}", f"{len(index):,}", size, f"{resident[-1]:.1f}"])
            mark += events // 20
    grown = resident[-1] - resident[len(resident) // 4]
    figures = {"soak_events": float(done), "soak_rss_growth_mib": grown}
    columns = ("block events", "resident blocks", "index MiB", "process RSS MiB")
    report("router-soak", "Memory of the index under churn", columns, table, figures)


def _rss() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dynamo-python", type=Path, help="a Python that has ai-dynamo-runtime==1.6.1")
    parser.add_argument("--soak", action="store_true", help="watch memory over many block events instead")
    parser.add_argument("--events", type=int, default=10_000_000, help="of the soak")
    options = parser.parse_args(arguments)
    if options.soak:
        soak(options.events)
        return
    if options.dynamo_python is None:
        print("Dynamo's side is skipped: name a Python that has ai-dynamo-runtime with --dynamo-python")
    dynamo = Dynamo(options.dynamo_python)
    figures: dict[str, float] = {}
    try:
        table = decisions(dynamo, figures)
        table += [
            [what, unit, "", ours, "-", theirs, "-", "-"]
            for what, unit, ours, theirs in intake(dynamo, figures)
        ]
    finally:
        dynamo.close()
    columns = (
        "what",
        "tokens",
        "replicas",
        "p50 ms or value",
        "p99 ms",
        "Dynamo p50",
        "Dynamo p99",
        "ours/theirs",
    )
    report("router", "Cost of a decision, ours and Dynamo's bindings in turns", columns, table, figures)


if __name__ == "__main__":
    main()
