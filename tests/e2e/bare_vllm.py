"""Greedy answers of bare vLLM, none of Kvorum in between: `python -m tests.e2e.bare_vllm MODEL OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e.prompts import MAX_TOKENS, PROMPTS


def main(model: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=2**30,
        max_num_batched_tokens=512,
        max_num_seqs=32,
    )
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    answers = []
    for (
        prompt
    ) in PROMPTS:  # one at a time: the reference is what the model says, not what a batch makes of it
        (result,) = engine.generate([prompt], params, use_tqdm=False)
        answers.append({"ids": list(result.outputs[0].token_ids), "text": result.outputs[0].text})
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
