"""Bare AsyncLLM in a process of its own: reads rounds as JSON lines, answers with results as JSON lines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"  # the same core as the cluster's only shard
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


async def main(model: str) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.bench.workload import Round, run
    from workers.cpu_dtype import resolve_dtype

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype=resolve_dtype("auto", "cpu", Path(model), {}),
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=True,
            enable_log_requests=False,
            disable_log_stats=True,
        )
    )
    count = 0

    async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        nonlocal count
        count += 1
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for output in engine.generate(tokens_input(list(prompt)), params, f"r{count}"):
            yield len(output.outputs[0].token_ids)

    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        result = await run(stream, Round(**json.loads(line)))
        print(json.dumps(result.to_dict()), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1]))
