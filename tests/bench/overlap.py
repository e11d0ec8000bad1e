"""What overlapping AllReduce with compute gains: TP=2 over two emulated hosts, and on shared memory.

Stock and overlapped take turns on the same replica, prompt by prompt. Needs root and iproute2 for the hosts.

    make bench NAME=overlap
    make bench NAME=overlap ARGS="--rates 1gbit --sizes 1024 2048 --pairs 3"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.bench.clusters import running
from tests.bench.report import ROOT, report
from tests.lab.lab import Lab, missing
from tests.lab.ray_nodes import start_ray
from workers.checkpoint import prepare
from workers.overlap.timeline import bound

SIZES = (128, 256, 512, 1024, 2048, 4096)
STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
UP_S, MEASURE_S = 400.0, 1500.0
FLAGS = ("--replicas", "1", "--tensor-parallel-size", "2", "--max-model-len", "8192")


@dataclass(frozen=True)
class Row:
    """One prompt length on one link; medians over the pairs, seconds."""

    link: str
    tokens: int
    chunks: int
    stock_s: float
    overlapped_s: float
    speedup: float
    """Of the time to the first token, paired."""
    forward_speedup: float
    """Of the shards' forward pass, paired."""
    waited_s: float
    """For AllReduces, in a stock pass."""
    exposed_s: float
    """The same in an overlapped one."""
    hideable_s: float
    bound: float
    stock_idle: float
    """Share of the turn's time that the machine's cores, which play all hosts, had nothing to do."""
    overlapped_idle: float

    @property
    def hidden_share(self) -> float:
        """Of the communication that compute could hide at all."""
        return (self.waited_s - self.exposed_s) / self.hideable_s if self.hideable_s else 0.0

    @property
    def cores_bound(self) -> float:
        """Highest speed-up of the stock turn's work on this machine: with no core idle at all."""
        return 1 / max(1e-9, 1 - self.stock_idle)

    @property
    def work_over_stock(self) -> float:
        """Seconds of cores that the overlapped turn takes, over those of the stock turn."""
        stock_s = self.stock_s * (1 - self.stock_idle)
        return self.overlapped_s * (1 - self.overlapped_idle) / stock_s

    @property
    def bound_share(self) -> float:
        """Of the gain that the bound allows."""
        return (self.forward_speedup - 1) / (self.bound - 1) if self.bound > 1 else 0.0


def rows(link: str, found: dict[str, Any]) -> list[Row]:
    """What the turns say of each prompt length.

    C and 2m of the bound are a whole pass: token-wise compute from the planner's samples, AllReduce as the
    stock passes waited for it, attention A what is left of a stock pass.
    """
    plan = found["plan"]["rows"]
    made = []
    for size, pairs in found["prefill"].items():
        tokens = int(size)
        row = next((r for r in reversed(plan) if r["tokens"] <= tokens), None)
        stock = _medians([pair["off"] for pair in pairs])
        ours = _medians([pair["auto"] for pair in pairs])
        chunks = row["chunks"] if row else 1
        if any(pair["off"]["split"] or bool(pair["auto"]["split"]) != (chunks > 1) for pair in pairs):
            raise RuntimeError(f"{link}, {tokens} tokens: steps did not take the path that the plan says")
        compute_s = layers() * row["compute_ms"] / 1e3 * tokens / row["tokens"] if row else 0.0
        attention_s = max(0.0, stock["forward_s"] - compute_s - stock["exposed_s"])
        made.append(
            Row(
                link=link,
                tokens=tokens,
                chunks=chunks,
                stock_s=stock["ttft_s"],
                overlapped_s=ours["ttft_s"],
                speedup=statistics.median(p["off"]["ttft_s"] / p["auto"]["ttft_s"] for p in pairs),
                forward_speedup=statistics.median(
                    p["off"]["forward_s"] / p["auto"]["forward_s"] for p in pairs
                ),
                waited_s=stock["exposed_s"],
                exposed_s=ours["exposed_s"],
                hideable_s=min(compute_s, stock["exposed_s"]),
                bound=bound(attention_s, compute_s, stock["exposed_s"] / 2),
                stock_idle=stock["idle_share"],
                overlapped_idle=ours["idle_share"],
            )
        )
    return made


def _medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


@cache
def layers() -> int:
    """Of the model that is measured."""
    config = json.loads((prepare("smollm2", 2).path / "config.json").read_text())
    return int(config["num_hidden_layers"])


def on_hosts(rates: Sequence[str], arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The same cluster of two hosts, measured at each rate of their links."""
    measured = {}
    with Lab(2, rates[0]) as lab:
        nodes, head = start_ray(lab), lab.hosts[0]
        kvorum = [sys.executable, "-m", "cluster.cli"]
        joining = ["--ray-address", nodes.address, "--placement", "spread", "--port", "0"]
        joining += ["--no-http", "--no-viewer", "--detach"]
        step = ["--max-num-batched-tokens", "4096"]
        try:
            head.run(
                [*kvorum, "up", "--name", "bench-overlap", *joining, *FLAGS, *step], STATE, timeout_s=UP_S
            )
            for rate in rates:
                lab.set_rate(rate)
                client = [sys.executable, "-m", "tests.bench.overlap_client", "bench-overlap", *arguments]
                done = head.popen(client, STATE, stdout=subprocess.PIPE, text=True)
                out, _ = done.communicate(timeout=MEASURE_S)
                if done.returncode:
                    raise RuntimeError(f"the measurement at {rate} ended with {done.returncode}")
                measured[rate] = json.loads(out.splitlines()[-1])
        finally:
            head.run([*kvorum, "down", "--grace", "1"], STATE, timeout_s=120, check=False)
    return measured


def on_shared_memory(arguments: Sequence[str]) -> dict[str, Any]:
    """Both shards on this machine, where `auto` stays stock."""
    with running("bench-overlap", *FLAGS, "--max-num-batched-tokens", "4096") as state:
        folder = os.environ | {"KVORUM_STATE_DIR": str(state.work_dir)}
        path = state.work_dir / f"{state.name}.json"
        path.write_text(state.model_dump_json())
        path.chmod(0o600)
        client = [sys.executable, "-m", "tests.bench.overlap_client", state.name, *arguments]
        done = subprocess.run(
            client, env=folder, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=MEASURE_S
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="*", default=["1gbit", "2.5gbit"], help="links of the two hosts")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="prompt lengths, tokens")
    parser.add_argument("--pairs", type=int, default=9, help="turns of each side for each length")
    parser.add_argument("--decodes", type=int, default=7, help="decode turns of each side")
    parser.add_argument("--no-shm", action="store_true", help="leave out the two shards on one host")
    given = parser.parse_args()
    if given.rates and (reason := missing()):
        parser.exit(3, f"{reason}\n")
    sizes = [str(size) for size in given.sizes]
    arguments = ["--sizes", *sizes, "--pairs", str(given.pairs), "--decodes", str(given.decodes)]
    measured = on_hosts(given.rates, arguments) if given.rates else {}
    if not given.no_shm:
        measured["shm"] = on_shared_memory(arguments)
    turns = ROOT / "bench-results" / "overlap-turns.json"
    turns.parent.mkdir(exist_ok=True)
    turns.write_text(json.dumps(measured))
    table = [row for link, found in measured.items() for row in rows(link, found)]
    figures: dict[str, float] = {}
    for row in table:
        place = f"{row.link}_{row.tokens}"
        if row.link != "shm":
            figures[f"speedup_{place}"] = row.speedup
            figures[f"cores_bound_{place}"] = row.cores_bound
            figures[f"overlapped_idle_{place}"] = row.overlapped_idle
            figures[f"work_over_stock_{place}"] = row.work_over_stock
            if row.chunks > 1:
                figures[f"hidden_share_{place}"] = row.hidden_share
                figures[f"bound_share_{place}"] = row.bound_share
    figures["worst_over_stock_any_size"] = max(1 / row.speedup for row in table)
    decodes = {
        link: statistics.median(pair["auto"] / pair["bare"] for pair in found["decode"])
        for link, found in measured.items()
        if found["decode"]
    }
    for link, ratio in decodes.items():
        figures[f"decode_over_stock_{link}"] = ratio
    if decodes:
        figures["decode_over_stock"] = max(decodes.values())
    columns = ["link", "tokens", "chunks", "stock TTFT ms", "overlapped", "speed-up", "of the pass", "bound"]
    columns += ["by cores", "idle", "work", "of its gain", "AllReduce ms", "exposed", "hideable", "hidden"]
    cells = [
        [
            row.link,
            str(row.tokens),
            str(row.chunks),
            f"{row.stock_s * 1e3:.0f}",
            f"{row.overlapped_s * 1e3:.0f}",
            f"x {row.speedup:.3f}",
            f"x {row.forward_speedup:.3f}",
            f"x {row.bound:.3f}",
            f"x {row.cores_bound:.3f}",
            f"{row.stock_idle:.0%} {row.overlapped_idle:.0%}",
            f"x {row.work_over_stock:.3f}",
            f"{row.bound_share:.0%}" if row.chunks > 1 else "-",
            f"{row.waited_s * 1e3:.0f}",
            f"{row.exposed_s * 1e3:.0f}",
            f"{row.hideable_s * 1e3:.0f}",
            f"{row.hidden_share:.0%}" if row.chunks > 1 else "-",
        ]
        for row in table
    ]
    report("overlap", "AllReduce overlapped with compute, TP=2", columns, cells, figures)
    for link, found in measured.items():
        print(f"{link}: {found['path']}, {found['reason']}")


if __name__ == "__main__":
    main()
