"""One workload for anything that streams tokens: the same prompts, seeds and timing on every side."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

Stream = Callable[[Sequence[int], int], AsyncIterator[int]]
"""(prompt token ids, tokens to generate) -> number of new tokens per message."""


@dataclass(frozen=True)
class Round:
    """`requests` prompts of `prompt_tokens` random tokens, `concurrency` at a time.

    Answers differ from `output_tokens` by up to `spread` tokens either way.
    """

    seed: int
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    spread: int = 0

    def answers(self) -> list[int]:
        """How many tokens each prompt is to be answered with."""
        generator = random.Random(-self.seed)
        least, most = self.output_tokens - self.spread, self.output_tokens + self.spread
        return [generator.randint(least, most) for _ in range(self.requests)]

    def prompts(self) -> list[list[int]]:
        """Different in every round, so that no side profits from a warm prefix cache."""
        generator = random.Random(self.seed)
        return [
            [generator.randrange(100, 40_000) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


@dataclass(frozen=True)
class Result:
    """Wall seconds, generated tokens, and each request's time to first token in seconds."""

    elapsed_s: float
    tokens: int
    ttft_s: list[float]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


async def run(stream: Stream, plan: Round) -> Result:
    """Run one round to its end."""
    answers = plan.answers()
    waiting = list(reversed(list(zip(plan.prompts(), answers, strict=True))))
    ttft_s: list[float] = []
    tokens = 0

    async def lane() -> None:
        nonlocal tokens
        while waiting:
            prompt, wanted = waiting.pop()
            began, first = time.perf_counter(), True
            async for count in stream(prompt, wanted):
                if first:
                    ttft_s.append(time.perf_counter() - began)
                    first = False
                tokens += count

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(plan.concurrency)))
    elapsed_s = time.perf_counter() - began
    assert tokens == sum(answers)
    return Result(elapsed_s, tokens, ttft_s)
