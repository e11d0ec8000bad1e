"""A real TP=2 engine in lock step with its test: requests join, and the path changes, at chosen steps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workers.placement import CONFIG_KEY, ReplicaPlacement, ShardSlot
from workers.plugin import SHARD_VARIABLE

BLOCK = 32
"""Tokens of a KV block."""

STEP_TOKENS = 512
"""Of the largest step; longer prompts take several."""

TOP = 3
"""Tokens at each position whose logprobs are compared."""

Logprobs = dict[int, float]


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it joins."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    step: int = 0
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and logprobs by token: of each of them, and of each prompt position where asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    prompt_logprobs: tuple[Logprobs, ...]
    cached: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True)
class Run:
    answers: tuple[Answer, ...]
    """In the order of the arrivals."""
    steps: int
    preemptions: int
    mixed: int
    """Steps with a prompt's tokens beside another request's decode."""


def placement(cores: tuple[int, ...] = (0,)) -> ReplicaPlacement:
    """Of two ranks on this host."""
    slots = tuple(ShardSlot(rank, rank, f"node{rank}", f"10.0.0.{rank}", cores) for rank in range(2))
    return ReplicaPlacement("r0", "epoch", "tests", "", "cpu", "gloo", slots)


class Engine:
    """Two worker processes, with the scheduler in this one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._names = 0

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Each rank's answer, in order."""
        answers: list[Any] = self._engine.collective_rpc(method, args=args)
        return answers

    def run(
        self, arrivals: Iterable[Arrival], mode: str | Callable[[int], str], keep_cache: bool = False
    ) -> Run:
        """Until all are answered. `mode` is the overlap's, or which one it is at each step.

        What is computed together depends on the arrivals alone, so that two runs of them can be compared.
        """
        if not keep_cache:
            assert self._engine.reset_prefix_cache()
        choose = mode if callable(mode) else lambda _step: mode
        ordered = list(arrivals)
        waiting = deque(sorted(range(len(ordered)), key=lambda index: ordered[index].step))
        indices: dict[str, int] = {}
        answers: dict[int, Answer] = {}
        preemptions: dict[str, int] = {}
        step = mixed = 0
        current = None
        while len(answers) < len(ordered):
            while waiting and ordered[waiting[0]].step <= step:
                index = waiting.popleft()
                indices[self._add(ordered[index])] = index
            if (wanted := choose(step)) != current:
                self.ask("set_overlap", wanted)
                current = wanted
            requests = dict(self._scheduler.requests)
            before = {name: request.num_computed_tokens for name, request in requests.items()}
            for output in self._engine.step():
                if output.finished:
                    answers[indices[output.request_id]] = _answer(output)
            computed = [request.num_computed_tokens - before[name] for name, request in requests.items()]
            preemptions |= {name: request.num_preemptions for name, request in requests.items()}
            mixed += 1 in computed and max(computed) > 1
            step += 1
        in_order = tuple(answers[index] for index in range(len(ordered)))
        return Run(in_order, step, sum(preemptions.values()), mixed)

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _add(self, arrival: Arrival) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._names += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=arrival.max_tokens,
            logprobs=TOP,
            prompt_logprobs=0 if arrival.prompt_logprobs else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(self._names)
        self._engine.add_request(name, {"prompt_token_ids": list(arrival.prompt)}, params)
        return name


@contextmanager
def started(model: Path, cache: Path, dtype: str = "float32", **settings: Any) -> Iterator[Engine]:
    """An engine that runs `model` at TP=2 over gloo; it ends with the context, and its processes with it."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two ranks that spin need two cores")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            SHARD_VARIABLE: "1",
            "KVORUM_CACHE_DIR": str(cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[1]}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "TORCHDYNAMO_DISABLE": "1",  # of the sampler: ten seconds that no test is about
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            environment.setenv(name, value)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        defaults: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "overlap_worker.Worker",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": STEP_TOKENS,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "additional_config": {CONFIG_KEY: placement().to_config()},
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**(defaults | settings)))
        try:
            running = Engine(engine)
            assert running.ask("attach", "off")
            yield running
        finally:
            engine.engine_core.shutdown()


def _answer(output: Any) -> Answer:
    choice = output.outputs[0]
    return Answer(
        tokens=tuple(choice.token_ids),
        logprobs=tuple(_plain(at) for at in choice.logprobs),
        prompt_logprobs=tuple(_plain(at) for at in output.prompt_logprobs or () if at),
        cached=output.num_cached_tokens or 0,
    )


def _plain(at: Any) -> Logprobs:
    return {token: value.logprob for token, value in at.items()}
