"""A fake controller and fake replicas in a process of their own, so that only the router is measured.

Each request says in its cache salt how its tokens come, one a message:
    ""          as fast as they are taken
    "steps:S"   one every S seconds, all streams together, as a batching engine does
    "apart:S"   one every S seconds, each stream at a phase of its own: the worst case
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from fakes_cluster import DIGEST, FakeController, FakeReplica, model_info

from protos import common_pb2, replica_pb2

WORDS = b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


class PacedReplica(FakeReplica):
    """Tokens at the pace that the request asks for."""

    async def _generate(
        self, request: replica_pb2.ReplicaGenerateRequest, context: Any
    ) -> AsyncIterator[common_pb2.GenerateResponse]:
        kind, _, period = request.cache_salt.partition(":")
        period_s, count = float(period or 0), request.sampling.max_tokens
        token = common_pb2.GenerateResponse()
        token.choices.add(index=0, text=" token", token_ids=[123])
        last = common_pb2.GenerateResponse(usage=common_pb2.Usage(completion_tokens=count))
        last.choices.add(index=0, text=" token", token_ids=[123], finish_reason=common_pb2.LENGTH)
        if kind == "apart":
            await asyncio.sleep(random.random() * period_s)
        for k in range(count):
            if kind == "steps":
                await asyncio.sleep(period_s - time.time() % period_s)
            elif kind == "apart" and k:
                await asyncio.sleep(period_s)
            yield last if k == count - 1 else token


async def main(replicas: int) -> None:
    controller = await FakeController().start()
    controller.bundles[DIGEST].tokenizer_json = WORDS
    model = model_info(max_model_len=1 << 20)
    fakes = [PacedReplica(f"r{i}", model=model, heartbeat_s=1.0) for i in range(replicas)]
    for fake in fakes:
        await fake.start()
    await controller.announce(*[fake.member() for fake in fakes])
    print(controller.address, *[fake.address for fake in fakes], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    uvloop.run(main(parser.parse_args().replicas))
