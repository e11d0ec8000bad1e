"""The right answers for `tests.bench.kvpool_soak`: plain vLLM's, in float32, one computation for each prompt.

Prompts after which the greedy choice is nearly a tie, at any token of the answer, are left out: there another
batch may round to another token, with no fault anywhere. Writes prompts and answers as JSON to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from tests.bench.kvpool_soak_requests import ANSWER_TOKENS, PREFIXES, PROMPTS_PER_FAMILY, candidates

LEAST_MARGIN = 1e-3
"""Between the logprobs of the first and the second choice."""
_BATCHES = 4


@dataclass(frozen=True)
class Right:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    """Of the answer's tokens."""
    margin: float
    """The least between a first and a second choice."""


def answered(llm: Any, prompts: list[list[int]]) -> list[Right]:
    """Greedily."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=2, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for prompt, output in zip(prompts, llm.generate(given, params, use_tqdm=False), strict=True):
        [choice] = output.outputs
        places = [
            sorted((each.logprob for each in place.values()), reverse=True) for place in choice.logprobs
        ]
        margin = min(first - second for first, second, *_ in places)
        found.append(Right(prompt, list(choice.token_ids), [first for first, *_ in places], margin))
    return found


def reference(llm: Any, seed: int, per_family: int) -> dict[str, Any]:
    """So many prompts of each family, with their answers."""
    kept: list[list[Right]] = [[] for _ in PREFIXES]
    asked = 0
    for batch in range(_BATCHES):
        lacking = max(per_family - len(family) for family in kept)
        if not lacking:
            break
        families = [
            prompts if len(has) < per_family else []
            for prompts, has in zip(candidates(seed, lacking, batch), kept, strict=True)
        ]
        flat = [(number, prompt) for number, prompts in enumerate(families) for prompt in prompts]
        asked += len(flat)
        for (number, _), right in zip(flat, answered(llm, [prompt for _, prompt in flat]), strict=True):
            if right.margin >= LEAST_MARGIN and len(kept[number]) < per_family:
                kept[number].append(right)
    chosen = [one for family in kept for one in family]
    print(f"{asked} prompts were answered, {len(chosen)} are kept", file=sys.stderr)
    return {
        "seed": seed,
        "prompts": [right.prompt for right in chosen],
        "answers": [right.answer for right in chosen],
        "logprobs": [right.logprobs for right in chosen],
        "margins": [right.margin for right in chosen],
    }


def main() -> None:
    from vllm import LLM

    from workers.checkpoint import prepare

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path, help="to write")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--per-family", type=int, default=PROMPTS_PER_FAMILY, help="prompts")
    given = parser.parse_args()
    llm = LLM(
        model=str(prepare(given.model).path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    found = {"model": given.model} | reference(llm, given.seed, given.per_family)
    partial = given.file.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(given.file)


if __name__ == "__main__":
    main()
