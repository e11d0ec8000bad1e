"""Clients that come all at once and leave at random leave nothing behind: `make bench NAME=http_soak`.

It fails when a router still holds a lease afterwards, an engine a request, the HTTP face a load, or when a
client that stayed saw anything but 200, 429 or 503.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.request

from cluster.adminclient import AdminClient
from cluster.state import ClusterState
from tests.bench.clusters import running
from tests.bench.http_storm import storm
from tests.bench.report import report
from tests.e2e.router_state import router_state

MODEL = "smollm2"
SETTLE_S = 20.0
LEAVE_WITHIN_S = 30.0


def left_behind(state: ClusterState) -> dict[str, int]:
    """Leases and streams of every router, requests of every engine, and requests of the HTTP face; now."""
    routers = [router_state(address, state.token) for address in state.router_addresses]
    with AdminClient(state.admin_address, state.token) as admin:
        loads = [replica.load for replica in admin.status().replicas]
    with urllib.request.urlopen(f"{state.http_url}/load", timeout=5) as answer:
        load = json.loads(answer.read())["server_load"]
    return {
        "leases": sum(router.leases for router in routers),
        "router_streams": sum(router.in_flight for router in routers),
        "engine_running": sum(load.running for load in loads),
        "engine_waiting": sum(load.waiting for load in loads),
        "http_requests": load,
    }


def settled(state: ClusterState) -> tuple[dict[str, int], float]:
    """What is left behind once it does not change any more for the better, and after how many seconds."""
    began = time.monotonic()
    while any((left := left_behind(state)).values()) and time.monotonic() - began < SETTLE_S:
        time.sleep(0.2)
    return left, time.monotonic() - began


def main(connections: int, rounds: int) -> None:
    flags = ["--replicas", "2", "--max-model-len", "4096", "--http-port", "0"]
    flags.append("--http-argument=--enable-server-load-tracking")
    rows, broken, leaks, slowest_s = [], [], 0, 0.0
    seen: dict[int, int] = {}
    gone = 0
    with running("bench-http-soak", *flags) as state:
        for number in range(rounds):
            began = time.monotonic()
            result = asyncio.run(storm(state.http_url, MODEL, connections, number, LEAVE_WITHIN_S))
            took_s = time.monotonic() - began
            left, after_s = settled(state)
            answered, refused = result.statuses[200], result.statuses[429] + result.statuses[503]
            counts = [answered, refused, result.left, len(result.broken)]
            times = [f"{took_s:.1f}", f"{after_s:.1f}"]
            rows.append([f"round {number}", *map(str, counts), *times, str(sum(left.values()))])
            broken += result.broken
            leaks += sum(left.values())
            slowest_s = max(slowest_s, after_s)
            gone += result.left
            for status, count in result.statuses.items():
                seen[status] = seen.get(status, 0) + count
    figures = {
        "connections": connections * rounds,
        "answered": seen.get(200, 0),
        "refused": seen.get(429, 0) + seen.get(503, 0),
        "disconnected": gone,
        "broken": len(broken),
        "leaked": leaks,
        "settled_after_s": slowest_s,
    }
    columns = ["", "answered", "refused", "left", "broken", "took s", "settled after s", "leaked"]
    report("http_soak", f"{connections} connections, half of which leave", columns, rows, figures)
    if broken or leaks:
        raise SystemExit("\n".join([f"{leaks} leases, streams or requests were left behind", *broken[:20]]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=500, help="at once")
    parser.add_argument("--rounds", type=int, default=3, help="how often")
    main(**vars(parser.parse_args()))
