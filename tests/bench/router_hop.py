"""What one hop through the router costs: `python -m tests.bench.router_hop`.

Three processes: fake replicas, the router, and this one as the client. The fake replicas stream
one token a message, so this is the router's worst case per token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import uvloop

from protos import common_pb2, inference_pb2, replica_pb2
from protos.channels import open_channel

ROOT = Path(__file__).resolve().parents[2]
STREAMS = 64
TOKENS_PER_S = 20


class Router:
    """The router's process and what it has used."""

    def __init__(self, process: subprocess.Popen[str], address: str, start_s: float) -> None:
        self.address, self.start_s = address, start_s
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20


@contextmanager
def started(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str], float]]:
    """Run a module until the block ends; its first line, and the seconds until that came."""
    began = time.monotonic()
    command = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"tests.bench.{module} did not start")
        yield process, words, time.monotonic() - began
    finally:
        process.terminate()
        process.wait(timeout=20)


async def first_message_s(call: Any, request: bytes) -> float:
    """Seconds from sending a request to its first message; the rest of the stream is read too."""
    began = time.perf_counter()
    stream = call(request, timeout=30)
    await stream.read()
    elapsed = time.perf_counter() - began
    while await stream.read() is not grpc.aio.EOF:
        pass
    return elapsed


async def added_first_token_ms(routed: Any, direct: Any, rounds: int) -> tuple[float, float]:
    """p50 of a request through the router and straight to a replica, one at a time, in turn."""
    sampling = common_pb2.SamplingParams(max_tokens=2)
    tokens = list(range(100)) * 2
    through = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=tokens), sampling=sampling)
    straight = replica_pb2.ReplicaGenerateRequest(
        request_id="direct", prompt_token_ids=tokens, sampling=sampling
    )
    times: dict[str, list[float]] = {"routed": [], "direct": []}
    for turn in range(rounds + 20):
        for name, call, request in (("routed", routed, through), ("direct", direct, straight)):
            elapsed = await first_message_s(call, request.SerializeToString())
            if turn >= 20:
                times[name].append(elapsed * 1e3)
    return statistics.median(times["routed"]), statistics.median(times["direct"])


async def streamed(call: Any, router: Router, salt: str, tokens: int) -> tuple[float, float]:
    """STREAMS streams at once: the router's CPU seconds per token, and tokens per second."""
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=common_pb2.SamplingParams(max_tokens=tokens),
        options=inference_pb2.RequestOptions(cache_salt=salt),
    ).SerializeToString()

    async def one() -> int:
        count, stream = 0, call(request, timeout=120)
        while await stream.read() is not grpc.aio.EOF:
            count += 1
        return count

    cpu_s, began = router.cpu_s(), time.monotonic()
    total = sum(await asyncio.gather(*[one() for _ in range(STREAMS)]))
    elapsed = time.monotonic() - began
    assert total == STREAMS * tokens
    return (router.cpu_s() - cpu_s) / total, total / elapsed


async def measured(router: Router, replica: str, seconds: float) -> dict[str, float]:
    period = 1 / TOKENS_PER_S
    paced = int(seconds * TOKENS_PER_S)
    async with open_channel(router.address) as near, open_channel(replica) as far:
        routed: Any = near.unary_stream("/kvorum.v1.Inference/Generate")
        direct: Any = far.unary_stream("/kvorum.v1.Replica/Generate")
        await ready(near)
        routed_ms, direct_ms = await added_first_token_ms(routed, direct, rounds=300)
        await streamed(routed, router, "", 50)
        full_s, full_rate = await streamed(routed, router, "", 300)
        steps_s, _ = await streamed(routed, router, f"steps:{period}", paced)
        apart_s, _ = await streamed(routed, router, f"apart:{period}", paced)
    return {
        "router_start_s": router.start_s,
        "router_rss_mib": router.rss_mib(),
        "direct_ttft_p50_ms": direct_ms,
        "routed_ttft_p50_ms": routed_ms,
        "router_added_p50_ms": routed_ms - direct_ms,
        "router_cpu_us_per_token": steps_s * 1e6,
        "router_cpu_us_per_token_apart": apart_s * 1e6,
        "router_cpu_us_per_token_full_speed": full_s * 1e6,
        "router_tokens_per_s_per_core": 1 / full_s,
        "tokens_per_s_full_speed": full_rate,
    }


async def ready(channel: grpc.aio.Channel) -> None:
    """Wait until both fake replicas are."""
    call: Any = channel.unary_unary(
        "/kvorum.v1.Inference/ListModels",
        inference_pb2.ListModelsRequest.SerializeToString,
        inference_pb2.ListModelsResponse.FromString,
    )
    async with asyncio.timeout(20):
        while not any(  # noqa: ASYNC110
            m.ready_replicas == 2 for m in (await call(inference_pb2.ListModelsRequest())).models
        ):
            await asyncio.sleep(0.05)


def figures(*, loop: str = "uvloop", traced: bool = False, seconds: float = 5.0) -> dict[str, float]:
    """Measure once.

    Args:
        loop: the router's event loop, "uvloop" or "asyncio".
        traced: whether the router records spans, into a store that is thrown away.
        seconds: how long each paced run lasts.

    Returns:
        router_start_s; router_rss_mib (after load); router_added_p50_ms, the median time to the
        first message through the router less that straight to a replica, 200 prompt tokens, one
        request at a time; router CPU in µs per token at 64 streams of 20 tokens/s, all in step as
        a batching engine sends them (router_cpu_us_per_token), each at its own phase (..._apart),
        or as fast as it goes (..._full_speed); and tokens per second of router CPU at full speed.
    """
    with tempfile.TemporaryDirectory() as folder, started("fake_replica_main") as (_, addresses, _s):
        arguments = [addresses[0], "--loop", loop]
        if traced:
            arguments += ["--trace-store", str(Path(folder) / "spans.db")]
        with started("router_main", *arguments) as (process, (address,), start_s):
            router = Router(process, address, start_s)
            return uvloop.run(measured(router, addresses[1], seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--traced", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    for name, value in figures(**vars(parser.parse_args())).items():
        print(f"{name:40} {value:10.3f}")
