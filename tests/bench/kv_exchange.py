"""How fast agents move KV blocks between two arenas: `make bench NAME=kv_exchange`.

Two agents in processes of their own, over loopback, so that the figure is what the agents can do and not what
a network can. Beside it: the same bytes over a bare TCP connection between two processes, with the same
checksum taken at both ends, which no exchange of verified blocks can beat. CPU seconds are of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bearer, open_channel
from tests.bench.report import report
from workers.kvpool.admission import Policy
from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.arena import Arena
from workers.kvpool.checksum import checksum
from workers.kvpool.header import Header, file_name
from workers.kvpool.index import Seal
from workers.kvpool.layout import Geometry
from workers.kvpool.owners import OwnerKind
from workers.kvpool.transport import pack_names

TOKEN = "bench"
NAMESPACE = {"made for": "a benchmark"}
DIGEST = file_name(NAMESPACE).removesuffix(".arena")

Work = Callable[..., None]


def make_arena(folder: Path, blocks: int, block_bytes: int, filled: bool) -> Arena:
    folder.mkdir()
    header = Header(Geometry(blocks, 1, block_bytes), NAMESPACE, Policy.LRU)
    arena = Arena.create(folder / file_name(NAMESPACE), header)
    arena.attach(OwnerKind.ENGINE)
    if filled:
        keys = [number.to_bytes(32, "big") for number in range(1, blocks + 1)]
        slots = [slot for slot in arena.allocate(keys, range(1, blocks + 1)) if slot is not None]
        for slot in slots:
            data = os.urandom(block_bytes)
            arena.write_part(*slot, 0)[:] = data
            arena.seal_parts(0, [Seal(*slot, checksum(data))])
        assert all(arena.commit(slots))
    return arena


def serve_agent(folder: Path, ready: Connection) -> None:
    """Until the parent ends it."""

    async def serve() -> None:
        ready.send(await KvAgent(AgentSettings(folder, "127.0.0.1"), TOKEN).start())
        await asyncio.Event().wait()

    asyncio.run(serve())


def serve_bare(blocks: int, block_bytes: int, ready: Connection) -> None:
    """Send as many bytes, and the checksum of each block, to whoever connects."""
    data = os.urandom(block_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ready.send(f"127.0.0.1:{listening.getsockname()[1]}")
        while True:
            with listening.accept()[0] as peer:
                for _ in range(blocks):
                    peer.sendall(checksum(data).to_bytes(8, "little") + data)


def receive_bare(address: str, blocks: int, block_bytes: int) -> None:
    host, _, port = address.rpartition(":")
    part = bytearray(8 + block_bytes)
    with socket.create_connection((host, int(port))) as peer:
        for _ in range(blocks):
            view = memoryview(part)
            while view:
                view = view[peer.recv_into(view) :]
            assert checksum(memoryview(part)[8:]) == int.from_bytes(part[:8], "little")


def child(work: Work, *arguments: Any) -> tuple[Any, str]:
    """A process that does the work, once it has told its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(*arguments, there), daemon=True)
    process.start()
    if not here.poll(60):
        raise RuntimeError("a process did not start within 60 s")
    return process, here.recv()


def cpu_s(process: Any) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


async def pull(agent: str, source: str, first: int, blocks: int) -> None:
    request = kvpool_pb2.PullRequest(
        namespace=DIGEST, source=source, router_keys=pack_names(range(first, first + blocks)), timeout_s=60
    )
    async with open_channel(agent) as channel:
        stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)
        answer = await stub.Pull(request, metadata=bearer(TOKEN), timeout=60)
    assert (answer.blocks, answer.failed) == (blocks, ""), answer


def measure(folder: Path, blocks: int, block_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each round, and seconds of pulls of one block."""
    found: dict[str, list[float]] = {name: [] for name in ("agents", "agents_cpu", "one", "bare", "bare_cpu")}
    bulk = blocks - min(20, blocks // 2)
    with make_arena(folder / "source", blocks, block_bytes, filled=True):
        sender, source = child(serve_agent, folder / "source")
        bare_sender, bare_source = child(serve_bare, bulk, block_bytes)
        for turn in range(rounds):
            with make_arena(folder / f"target-{turn}", blocks, block_bytes, filled=False) as target:
                receiver, agent = child(serve_agent, folder / f"target-{turn}")
                for first in range(bulk + 1, blocks + 1):
                    began = time.perf_counter()
                    asyncio.run(pull(agent, source, first, 1))
                    found["one"].append(time.perf_counter() - began)
                began, used = time.perf_counter(), cpu_s(sender) + cpu_s(receiver)
                asyncio.run(pull(agent, source, 1, bulk))
                found["agents"].append(time.perf_counter() - began)
                found["agents_cpu"].append(cpu_s(sender) + cpu_s(receiver) - used)
                receiver.kill()
                receiver.join()
                target.path.unlink()
            own = time.process_time()
            began, used = time.perf_counter(), cpu_s(bare_sender)
            receive_bare(bare_source, bulk, block_bytes)
            found["bare"].append(time.perf_counter() - began)
            found["bare_cpu"].append(cpu_s(bare_sender) - used + time.process_time() - own)
        sender.kill()
        bare_sender.kill()
    return found


def main(blocks: int, block_kib: int, rounds: int) -> None:
    block_bytes = block_kib << 10
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kv-exchange-") as folder:
        found = measure(Path(folder), blocks, block_bytes, rounds)
    size = (blocks - min(20, blocks // 2)) * block_bytes / 1e9
    middle = {name: statistics.median(values) for name, values in found.items()}
    figures = {
        "agents_gb_per_s": size / middle["agents"],
        "bare_gb_per_s": size / middle["bare"],
        "agents_cpu_s_per_gb": middle["agents_cpu"] / size,
        "bare_cpu_s_per_gb": middle["bare_cpu"] / size,
        "one_block_ms": 1e3 * middle["one"],
    }
    rows = [
        ["GB/s", f"{figures['agents_gb_per_s']:.2f}", f"{figures['bare_gb_per_s']:.2f}"],
        ["CPU s per GB", f"{figures['agents_cpu_s_per_gb']:.2f}", f"{figures['bare_cpu_s_per_gb']:.2f}"],
        ["ms for one block, new connection", f"{figures['one_block_ms']:.2f}", ""],
    ]
    title = f"{blocks} blocks of {block_kib} KiB between two arenas, over loopback"
    report("kv_exchange", title, ["", "agents", "bare TCP and checksums"], rows, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--block-kib", type=int, default=360, help="SmolLM2-135M's are of 360 KiB")
    parser.add_argument("--rounds", type=int, default=5)
    main(**vars(parser.parse_args()))
