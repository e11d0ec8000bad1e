"""Policies compared in virtual time: `make bench NAME=simulate ARGS="--trace conversation_trace.jsonl"`.

The router's real parts (`router.decide`, `fleet`, `index`, `cost`, policies, `admission`, `leases`) choose
among simulated replicas (`tests.bench.simulated_replica`); only engines and networks are made up. All
policies get the same requests at the same moments. Arrivals are the trace's, squeezed or stretched so that
the fleet's load is what `--load` says: 1 is what the replicas would serve together if nothing was ever cached
(`Speed.requests_per_s`). They do not wait for answers: a session's next turn comes when the trace says.

TTFT counts from the arrival at the router, its queue included; TPOT is a request's mean time per further
token. The hit rate is the share of prompt tokens that were cached when first scheduled. Load CV is the
coefficient of variation over replicas, of the time they were busy, of the prompt tokens they computed, and of
the requests they got.

With `--pools lru,tinylfu` the replicas of a host share memory for finished blocks as well, under that
admission (`tests.bench.simulated_pool`); it is compared with `none` for our own policy alone. "Recomputed" is
the share of prompt tokens that were computed although one endless cache would have had them, "pooled" the
share that came from the host's memory, and "pulled" what travelled between hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from router.cost import CostSettings
from router.policies import POLICY_NAMES
from tests.bench.report import report
from tests.bench.simulated_pool import ADMISSIONS, PoolShape
from tests.bench.simulated_replica import Speed
from tests.bench.simulation import Outcome, Scenario, Simulation
from tests.bench.traces import Floats, Trace, generate, read

T = TypeVar("T")

OURS = "predicted-time"
RIVALS = ("round-robin", "power-of-two", "prefix-affinity")
COLUMNS = (
    "replicas", "load", "policy", "pool", "TTFT mean", "p50", "p90", "p99 ms", "TPOT p90", "hit %",
    "recomputed %", "pooled %", "pulls", "pulled GB", "computed Mtok", "CV busy", "tokens", "requests",
    "refused", "queue ms", "|error| ms", "preempted", "decisions/s", "wall s",
)  # fmt: skip
_SHAPE = tuple(each.name for each in fields(PoolShape) if each.name != "admission")
EXAMPLES = """examples:
  python -m tests.bench.simulate --trace conversation_trace.jsonl --replicas 8,64
  python -m tests.bench.simulate --requests 3000 --policies predicted-time,round-robin   # a generated trace
  python -m tests.bench.simulate --replicas 64 --routers 4 --spread 0.2    # four routers, uneven replicas
  python -m tests.bench.simulate --policies predicted-time --pools none,lru --network-gbit-s 25
  python -m tests.bench.simulate --requests 1000000 --replicas 1000 --policies predicted-time --load 0.7
"""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    replicas: int
    load: float
    policy: str
    pool: str
    mean: float
    p50: float
    p90: float
    p99: float
    tpot_p90: float
    hit_rate: float
    recomputed: float
    pooled: float
    pulls: int
    pulled_gb: float
    computed_mtok: float
    busy_cv: float
    tokens_cv: float
    requests_cv: float
    refused: int
    wait_ms: float
    error_ms: float
    preemptions: int
    decisions_per_s: float
    wall_s: float

    def cells(self) -> list[str]:
        return [
            f"{self.replicas}", f"{self.load:g}", self.policy, self.pool, f"{self.mean:.0f}",
            f"{self.p50:.0f}", f"{self.p90:.0f}", f"{self.p99:.0f}", f"{self.tpot_p90:.0f}",
            f"{self.hit_rate:.1%}", f"{self.recomputed:.1%}", f"{self.pooled:.1%}", f"{self.pulls}",
            f"{self.pulled_gb:.0f}", f"{self.computed_mtok:.1f}", f"{self.busy_cv:.2f}",
            f"{self.tokens_cv:.2f}", f"{self.requests_cv:.2f}", f"{self.refused}", f"{self.wait_ms:.0f}",
            f"{self.error_ms:.0f}", f"{self.preemptions}", f"{self.decisions_per_s:.0f}",
            f"{self.wall_s:.0f}",
        ]  # fmt: skip


def line(scenario: Scenario, policy: str, outcome: Outcome) -> Line:
    """The outcome in figures; times are NaN when nothing was served."""
    ttft, waits, errors = (_or_nan(column) for column in (outcome.ttft_ms, outcome.wait_ms, outcome.error_ms))
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99]).tolist()
    return Line(
        scenario.replicas, scenario.load, policy, _pool(scenario), float(ttft.mean()), p50, p90, p99,
        float(np.percentile(_or_nan(outcome.tpot_ms), 90)), outcome.hit_rate,
        scenario.trace.most_hits() - outcome.hit_rate, outcome.pooled_rate, outcome.pulls,
        outcome.pulled_bytes / 1e9, outcome.computed_tokens / 1e6, outcome.busy_cv,
        outcome.tokens_cv, outcome.requests_cv, outcome.refused, float(waits.mean()),
        float(np.median(np.abs(errors))), outcome.preemptions, outcome.decisions_per_s, outcome.wall_s,
    )  # fmt: skip


def _pool(scenario: Scenario) -> str:
    return "none" if scenario.pool is None else scenario.pool.admission


def _or_nan(values: Floats) -> Floats:
    return values if len(values) else np.array([np.nan])


def figures(lines: Sequence[Line]) -> dict[str, float]:
    """Every row's main figures by name, and the comparison with the rivals over all of them."""
    found: dict[str, float] = {}
    for each in lines:
        place = f"{each.policy}_{each.replicas}_{each.load:g}".replace("-", "_")
        place += "" if each.pool == "none" else f"_{each.pool}"
        found[f"ttft_p90_ms_{place}"] = each.p90
        found[f"hit_rate_{place}"] = each.hit_rate
        found[f"recomputed_{place}"] = each.recomputed
        found[f"busy_cv_{place}"] = each.busy_cv
    alone = [each for each in lines if each.pool == "none"]
    by_place = {(each.replicas, each.load, each.policy): each for each in alone}
    ours = [each for each in alone if each.policy == OURS]
    for rival in RIVALS:
        ratios = [
            by_place[each.replicas, each.load, rival].p90 / each.p90
            for each in ours
            if (each.replicas, each.load, rival) in by_place
        ]
        if ratios:
            found[f"ttft_p90_{rival.replace('-', '_')}_over_ours_least"] = min(ratios)
    if ours:
        found["load_cv_most"] = max(each.busy_cv for each in ours)
        found["tokens_cv_most"] = max(each.tokens_cv for each in ours)
        found["requests_cv_most"] = max(each.requests_cv for each in ours)
    return found


def progress(what: str, total: int) -> Callable[[int, float], None]:
    """Tells every few seconds how far a run is."""
    began = told = time.perf_counter()

    def tell(ended: int, virtual_s: float) -> None:
        nonlocal told
        now = time.perf_counter()
        if now - told >= 5.0:
            told = now
            print(
                f"  {what}: {ended} of {total}, {virtual_s:.0f} s virtual, {now - began:.0f} s real",
                flush=True,
            )

    return tell


def run(scenario: Scenario, policy: str, settings: CostSettings) -> Line:
    """One policy in one scenario."""
    what = f"{scenario.replicas} replicas, load {scenario.load:g}, {policy}, pool {_pool(scenario)}"
    outcome = Simulation(scenario, policy, settings, progress(what, len(scenario.trace))).run()
    found = line(scenario, policy, outcome)
    print(
        f"{what}: TTFT p90 {found.p90:.0f} ms, mean {found.mean:.0f}; hits {found.hit_rate:.1%}, "
        f"{found.recomputed:.1%} recomputed; busy CV "
        f"{found.busy_cv:.2f}; {found.refused} refused; {found.wall_s:.0f} s",
        flush=True,
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        trace, scenarios, settings = _prepare(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{trace.name}: {len(trace)} requests, {trace.input_tokens.mean():.0f} prompt and "
        f"{trace.output_tokens.mean():.0f} generated tokens on average; one endless cache would hit "
        f"{trace.most_hits():.1%} of the prompt tokens",
        flush=True,
    )
    lines = [
        run(scenario, policy, settings)
        for scenario in scenarios
        for policy in arguments.policies
        if scenario.pool is None or policy == OURS
    ]
    report(
        "simulate",
        f"simulated replicas, {trace.name}, {len(trace)} requests, {arguments.routers} router(s)",
        COLUMNS,
        [each.cells() for each in lines],
        figures(lines),
    )
    if arguments.lines is not None:
        arguments.lines.write_text("".join(json.dumps(asdict(each)) + "\n" for each in lines))
    return 0


def _prepare(arguments: argparse.Namespace) -> tuple[Trace, list[Scenario], CostSettings]:
    if arguments.trace is not None:
        trace = read(arguments.trace)
        if arguments.requests is not None:
            trace = trace.first(arguments.requests)
    else:
        requests = 12_000 if arguments.requests is None else arguments.requests
        trace = generate(requests, arguments.seed)
    shape = PoolShape(**{name: getattr(arguments, name) for name in _SHAPE})
    pools = [None if name == "none" else replace(shape, admission=name) for name in arguments.pools]
    scenarios = [
        Scenario(
            trace=trace,
            replicas=replicas,
            load=load,
            speed=Speed(**{each.name: getattr(arguments, each.name) for each in fields(Speed)}),
            spread=arguments.spread,
            routers=arguments.routers,
            report_s=arguments.report_ms / 1e3,
            max_queue=arguments.max_queue,
            deadline_s=arguments.deadline_s,
            sessions=arguments.sessions,
            pool=pool,
            seed=arguments.seed,
        )
        for replicas in arguments.replicas
        for load in arguments.load
        for pool in pools
    ]
    for scenario in scenarios:
        scenario.check()
    settings = CostSettings(
        **{each.name: getattr(arguments, each.name) for each in fields(CostSettings)},
    )
    return trace, scenarios, settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.simulate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, help="a file in Mooncake's format; without it one is generated")
    add("--requests", type=_count, help="take the first so many, or generate so many (default 12000)")
    add("--replicas", type=_list(_count), default=[8, 64], help="how many, comma-separated (default 8,64)")
    add("--load", type=_list(float), default=[0.5, 0.7, 0.9], help="comma-separated (default 0.5,0.7,0.9)")
    add("--policies", type=_list(_policy), default=list(POLICY_NAMES), help=f"of {', '.join(POLICY_NAMES)}")
    add("--pools", type=_list(_pool_name), default=["none", *ADMISSIONS], help="of none, lru, tinylfu")
    add("--routers", type=_count, default=1, help="each with its own view and queue (default 1)")
    add("--report-ms", type=float, default=100.0, help="least time between a replica's reports (default 100)")
    add("--spread", type=float, default=0.0, help="sigma of the replicas' lognormal speeds (default 0)")
    add("--sessions", action="store_true", help="requests name their session, where the trace knows it")
    add("--max-queue", type=int, default=1024, help="places in a router's queue (default 1024)")
    add("--deadline-s", type=float, default=600.0, help="of each request (default 600)")
    add("--seed", type=int, default=1, help="of the generated trace, of speeds and of chance (default 1)")
    add("--lines", type=Path, help="write the table's rows to this file, too, as JSON lines")
    groups = (("replicas", Speed()), ("shared memory", PoolShape()), ("router settings", CostSettings()))
    for title, settings in groups:
        group = parser.add_argument_group(title)
        for name in (each.name for each in fields(settings) if each.name != "admission"):
            value = getattr(settings, name)
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, type=type(value), default=value, help=f"default {value:g}")
    return parser


def _list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    def of(text: str) -> list[T]:
        return [parse(part) for part in text.split(",")]

    return of


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _pool_name(text: str) -> str:
    if text != "none" and text not in ADMISSIONS:
        raise argparse.ArgumentTypeError(f"no pool '{text}'; choose of none, {', '.join(ADMISSIONS)}")
    return text


def _policy(text: str) -> str:
    if text not in POLICY_NAMES:
        raise argparse.ArgumentTypeError(f"no policy '{text}'; choose of {', '.join(POLICY_NAMES)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
