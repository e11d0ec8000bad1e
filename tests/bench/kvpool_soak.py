"""The KV pool under faults, with real replicas on two emulated hosts: `make bench NAME=kvpool_soak`.

Thousands of requests whose right answers are known go through a router, while writers, readers, agents and at
last a host are killed, agents stall, and bytes of blocks change. It fails when a token is wrong, a request
hangs, a lease is left, a fault could not be made, or the pool was not used. Needs root and iproute2.

    make bench NAME=kvpool_soak
    make bench NAME=kvpool_soak ARGS="--requests 200 --quick"
    make bench NAME=kvpool_soak ARGS="--requests 300 --only 'reader shard' flips"
    make bench NAME=kvpool_soak ARGS="--reference /tmp/reference.json --seed 2"
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from cluster.state import ClusterState
from tests.bench.kvpool_soak_answers import Answer
from tests.bench.kvpool_soak_asking import Asking, SoakError
from tests.bench.kvpool_soak_faults import Faults, arena_of
from tests.bench.kvpool_soak_model import BLOCK_TOKENS, WHOLE, block_bytes, shortened
from tests.bench.kvpool_soak_plan import AFTER_HOST, PLAN, QUICK, Fault, Made
from tests.bench.kvpool_soak_verdict import Shown, verdict
from tests.bench.report import ROOT, report
from tests.lab.host import Host
from tests.lab.lab import Lab, LabError, missing
from tests.lab.ray_nodes import start_ray
from workers.kvpool.errors import ArenaError
from workers.kvpool.layout import Geometry

NAME = "bench-kvpool-soak"
RATE = "1gbit"
SHAPE = (
    *("--dtype", "float32", "--max-model-len", "1024", "--cores-per-shard", "1", "--max-num-seqs", "8"),
    *("--engine-arg", f"block_size={BLOCK_TOKENS}"),
)
OWN_BLOCKS = 88
"""Of a replica's own cache: fewer than the running requests and their families have."""
POOL_BLOCKS = 180
"""Of a host's arena: half of what is asked for again and again."""
STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
LANES = 8
UP_S, DOWN_S, STATUS_S, REFERENCE_S = 400.0, 180.0, 30.0, 600.0
REACH_S = 900.0
"""For the share of the requests at which the next fault is due."""
END_S = 600.0
_KVORUM = (sys.executable, "-m", "cluster.cli")


def sizes(layers: int) -> list[str]:
    """Flags for a model of so many layers."""
    block = block_bytes(layers)
    pool = Geometry(POOL_BLOCKS, 1, block).total_bytes
    own = OWN_BLOCKS * block
    return ["--kv-cache-gib", str(own / 2**30), "--kv-pool-gib", str(pool / 2**30)]


def right_answers(file: Path, model: str, seed: int) -> None:
    """Make the file of prompts and answers unless it is there."""
    if file.exists():
        known = json.loads(file.read_text())
        if (known["model"], known["seed"]) == (model, seed):
            return
    print("computing the right answers", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tests.bench.kvpool_soak_reference", model, str(file)]
    environ = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [*command, "--seed", str(seed)], env=environ, cwd=ROOT, timeout=REFERENCE_S, check=True, stdout=2
    )


def soak(known: Path, seed: int, requests: int, plan: Sequence[Fault], layers: int) -> Shown:
    """One run, on hosts of its own. Raises SoakError, LabError."""
    flags = [*SHAPE, *sizes(layers), "--model", shortened(layers)]
    with Lab(2, RATE) as lab:
        nodes, head = start_ray(lab), lab.hosts[0]
        joining = ["--ray-address", nodes.address, "--placement", "spread", "--port", "0"]
        joining += ["--no-http", "--no-viewer", "--detach", "--replicas", "2"]
        try:
            print("starting the cluster", file=sys.stderr, flush=True)
            head.run([*_KVORUM, "up", "--name", NAME, *joining, *flags], STATE, timeout_s=UP_S)
            return _asked(lab, known, seed, requests, plan)
        finally:
            with suppress(subprocess.TimeoutExpired):
                head.run(
                    [*_KVORUM, "down", "--name", NAME, "--grace", "1"], STATE, timeout_s=DOWN_S, check=False
                )


def _asked(lab: Lab, known: Path, seed: int, requests: int, plan: Sequence[Fault]) -> Shown:
    head = lab.hosts[0]
    state = ClusterState.model_validate_json(head.path(f"/tmp/state/{NAME}.json").read_text())
    assert state.kv_pool_folder is not None
    arenas = {host.index: arena_of(lab, host.index, state.kv_pool_folder) for host in lab.hosts}
    arguments = [NAME, "--requests", str(requests), "--lanes", str(LANES), "--seed", str(seed)]
    began, made, looks = time.time(), list[Made](), list[list[float]]()
    with Asking(head, arguments, STATE, known) as asking:
        faults = Faults(lab, asking, arenas, lambda: _routers(head), random.Random(seed))

        def due(fault: Fault) -> bool:
            looks.append([arena.full for arena in arenas.values()])
            return asking.done >= fault.at * requests

        asking.wait(asking.ready, "the client knew of all replicas", STATUS_S)
        for fault in plan:
            made.append(_made(fault, partial(due, fault), asking, faults))
            _tell(made[-1], began)
        more = asking.done + AFTER_HOST * requests
        asking.wait(lambda: asking.done >= more, "the other host had answered for the lost one", REACH_S)
        restarts = {replica["replica"]: int(replica["restarts"]) for replica in asking.replicas}
        answers = asking.end(END_S)
    leaks = faults.leaks()
    counters = {f"host {index}": arena.counters() for index, arena in arenas.items()}
    used = looks[len(looks) // 10 :]  # when they have been filled
    full = {name: statistics.mean(each) for name, each in zip(counters, zip(*used, strict=True), strict=True)}
    return Shown(answers, made, leaks, counters, restarts, began, full)


def _made(fault: Fault, due: Callable[[], bool], asking: Asking, faults: Faults) -> Made:
    """When it is due. What is wrong with the cluster after one fault shows in what becomes of the next."""
    try:
        asking.wait(due, f"it was time for: {fault.name}", REACH_S)
        return faults.make(fault)
    except (SoakError, ArenaError, OSError) as error:
        return Made(fault, time.time(), seen=f"{type(error).__name__}: {error}", in_flight=asking.in_flight)


def _routers(head: Host) -> dict[str, int]:
    """Streams and leases that the routers count. Raises LabError."""
    said = head.run([*_KVORUM, "status", "--name", NAME, "--json"], STATE, timeout_s=STATUS_S).stdout
    states: dict[str, Any] = json.loads(said)["routing"]
    silent = [name for name, state in states.items() if "error" in state]
    return {
        "router streams": sum(state.get("in_flight", 0) for state in states.values()),
        "router leases": sum(state.get("leases", 0) for state in states.values()),
        "routers that do not say": len(silent) + (not states),
    }


def _tell(made: Made, began: float) -> None:
    done = "made" if made.done else "NOT MADE"
    print(f"{made.at - began:.0f} s: {made.fault.name}: {done}: {made.seen}", file=sys.stderr, flush=True)


def _keep(answers: Sequence[Answer], made: Sequence[Made]) -> None:
    """All that was seen, for whoever asks why."""
    folder = ROOT / "bench-results"
    folder.mkdir(exist_ok=True)
    content = {
        "answers": [answer.to_list() for answer in answers],
        "faults": [[*astuple(each.fault), each.at, each.until, each.done, each.seen] for each in made],
    }
    (folder / "kvpool_soak_answers.json").write_text(json.dumps(content))


def main(
    requests: int, seed: int, layers: int, reference: Path | None, only: Sequence[str], *, quick: bool
) -> int:
    """Returns the exit status."""
    plan = [fault for fault in (QUICK if quick else PLAN) if not only or fault.kind in only]
    if why := missing():
        print(f"no two hosts: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        known = reference or Path(folder, "reference.json")
        right_answers(known, shortened(layers), seed)
        began = time.monotonic()
        try:
            shown = soak(known, seed, requests, plan, layers)
        except (SoakError, LabError) as error:
            print(f"the soak was cut short: {error}", file=sys.stderr)
            return 1
    _keep(shown.answers, shown.faults)
    found = verdict(shown)
    found.figures["minutes"] = (time.monotonic() - began) / 60
    title = f"{len(shown.answers)} requests to two replicas, a host each, with faults ({layers} layers)"
    report("kvpool_soak", title, ["what", "count", "seen"], found.rows, found.figures)
    for against in found.against:
        print(f"FAILED: {against}")
    return int(bool(found.against))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000, help="at least; more until all faults are made")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, mix and faults")
    parser.add_argument(
        "--layers", type=int, default=8, help=f"of SmolLM2 that the model has; with all {WHOLE}, half an hour"
    )
    parser.add_argument("--reference", type=Path, help="file of right answers, made unless it is there")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=sorted({fault.kind for fault in PLAN}),
        help="faults of these kinds alone",
    )
    parser.add_argument("--quick", action="store_true", help="fewer faults, for a short look")
    sys.exit(main(**vars(parser.parse_args())))
