"""Real process groups: NCCL with one rank, and two ranks that share one GPU."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tests.lab.device_checks import Results, expect
from tests.lab.device_model import Blocking, Model, Shape, random_inputs, random_layers
from workers.overlap import decoder as decoders
from workers.overlap.channel import Channel, GlooChannel, StreamChannel
from workers.overlap.streams import CudaDevice

RANKS_S = 60
"""Two processes that load torch, meet and compute for a second."""
_TOKENS = (96, 500)
_CHUNKS = (1, 2, 3, 4)


def nccl_alone(shape: Shape) -> Results:
    """A sibling group of one rank as the channel's collective: the result is the model's own."""
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        sibling = distributed.new_group([0], backend="nccl", group_desc="kvorum-overlap")

        def reduce(tensor: torch.Tensor) -> None:
            distributed.all_reduce(tensor, group=sibling)

        channel = StreamChannel(reduce, torch.cuda.Stream(priority=-1), CudaDevice())
        model = Model(random_layers(shape, "cuda"))
        for tokens in (64, 1000):
            hidden, positions = random_inputs(shape, tokens, "cuda")
            for chunks in (2, 4, 8):
                got = decoders.run(model, channel, hidden, positions, chunks)
                want = decoders.run(model, Blocking(lambda _tensor: None), hidden, positions, chunks)
                expect(torch.equal(got, want), f"NCCL of one rank: {tokens} tokens in {chunks} chunks differ")
        return {"version": ".".join(map(str, torch.cuda.nccl.version())), "equal": True}
    finally:
        distributed.destroy_process_group()


def nccl_pair(shape: Shape) -> Results:
    """What NCCL says to two ranks on one GPU. A refusal is no failure: most versions refuse."""
    outcomes = _pair("nccl", "cuda", shape)
    if all("digests" in outcome for outcome in outcomes):
        _compare(outcomes)
        return {"refused": False, "ranks": outcomes}
    return {"refused": True, "said": [outcome.get("error", outcome) for outcome in outcomes]}


def gloo_pair(device: str, shape: Shape) -> Results:
    """Two real ranks, each with half the model, over gloo: overlapped in 2 to 4 chunks as stock does it."""
    outcomes = _pair("gloo", device, shape)
    for outcome in outcomes:
        expect("digests" in outcome, f"a rank failed: {outcome.get('error', outcome)}")
    _compare(outcomes)
    return {"furthest_from_one_rank": max(outcome["furthest"] for outcome in outcomes), "equal": True}


def _compare(outcomes: list[Results]) -> None:
    first, second = (outcome["digests"] for outcome in outcomes)
    expect(first == second, f"the ranks' results differ: {first} and {second}")
    for size, (overlapped, one_stream) in first.items():
        expect(overlapped == one_stream, f"{size}: overlapped and blocking sums of the same chunks differ")
    for outcome in outcomes:
        expect(outcome["furthest"] < 0.05, f"far from the model on one rank: {outcome['furthest']}")


def _pair(backend: str, device: str, shape: Shape) -> list[Results]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values = [shape.hidden, shape.heads, shape.kv_heads, shape.head, shape.ffn, shape.layers]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.lab.device_ranks",
                json.dumps([rank, backend, device, port, values]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NCCL_DEBUG": "WARN"},
        )
        for rank in range(2)
    ]
    outcomes: list[Results] = []
    end = time.monotonic() + RANKS_S
    for process in ranks:
        try:
            out, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            errors += f"\nno end after {RANKS_S} s"
        last = out.strip().splitlines()[-1:] or [""]
        try:
            outcomes.append(json.loads(last[0]))
        except ValueError:
            outcomes.append({"error": f"{out[-600:]} {errors[-1200:]}"})
    return outcomes


def _rank(rank: int, backend: str, device: str, port: int, values: list[int]) -> Results:
    """One of two processes."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=RANKS_S - 20),
    )
    sibling = distributed.new_group([0, 1], backend=backend, group_desc="kvorum-overlap")
    shape = replace(Shape(*values), dtype=torch.float32)  # in which two ranks' sums stay close to one rank's
    whole = random_layers(shape, device)
    model, own = Model(whole), Model([layer.cut(rank, 2) for layer in whole])

    def blocking(tensor: torch.Tensor) -> None:
        distributed.all_reduce(tensor)

    channel: Channel = GlooChannel(sibling)
    if device == "cuda":
        channel = StreamChannel(
            lambda tensor: distributed.all_reduce(tensor, group=sibling), torch.cuda.Stream(), CudaDevice()
        )
    digests, furthest = {}, 0.0
    for tokens in _TOKENS:
        hidden, positions = random_inputs(shape, tokens, device)
        want = decoders.run(model, Blocking(lambda _tensor: None), hidden, positions, 1)
        for chunks in _CHUNKS:
            got = decoders.run(own, channel, hidden, positions, chunks)
            one_stream = decoders.run(own, Blocking(blocking), hidden, positions, chunks)
            digests[f"{tokens} tokens, {chunks} chunks"] = [_digest(got), _digest(one_stream)]
            furthest = max(furthest, ((got - want).abs().max() / want.abs().max()).item())
    distributed.destroy_process_group()
    return {"digests": digests, "furthest": furthest}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _main() -> None:
    try:
        arguments: Any = json.loads(sys.argv[1])
        outcome = _rank(*arguments)
    except Exception as error:  # whatever the backend says is the result
        outcome = {"error": f"{type(error).__name__}: {error}"[:1500]}
    print("\n" + json.dumps(outcome), flush=True)
    os._exit(0)  # NCCL's threads may not end after a refusal


if __name__ == "__main__":
    _main()
