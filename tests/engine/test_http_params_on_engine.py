"""On a real engine a request answers the same, sent to vLLM itself or carried over the wire.

One engine, no prefix cache, greedy or seeded, float32: nothing but the way differs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fakes_replica import FakeContext, FakeObserver
from one_process import start_engine
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from cluster.openai.outputs import OutputAssembler
from cluster.openai.params import to_wire
from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from router import validate
from workers.checkpoint import prepare
from workers.config import EngineConfig
from workers.engine import Engine
from workers.servicer import ReplicaServicer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1029]
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class Sides:
    """The same engine, by both ways."""

    def __init__(self, engine: Engine, servicer: ReplicaServicer, model: common_pb2.ModelInfo) -> None:
        self.engine, self._servicer, self._model = engine, servicer, model
        self._sent = 0

    async def bare(self, params: SamplingParams) -> list[RequestOutput]:
        """Straight into vLLM."""
        llm: Any = self.engine._llm
        self._sent += 1
        outputs = llm.generate(tokens_input(list(PROMPT)), params.clone(), f"bare-{self._sent}")
        return [output async for output in outputs]

    async def carried(self, params: SamplingParams, **options: Any) -> list[RequestOutput]:
        """As bytes, past the router's checks, through the replica's servicer and the assembler."""
        self._sent += 1
        name = f"carried-{self._sent}"
        wire = to_wire(params, **options)
        validate.sampling(wire, self._model, prompt_tokens=len(PROMPT), max_n=8)
        request = replica_pb2.ReplicaGenerateRequest(
            request_id=name, prompt_token_ids=PROMPT, sampling=wire
        ).SerializeToString()
        assembler = OutputAssembler(name, None, PROMPT, params, None)
        context: Any = FakeContext()
        found = []
        async for message in self._servicer.Generate(
            replica_pb2.ReplicaGenerateRequest.FromString(request), context
        ):
            found += assembler.feed(common_pb2.GenerateResponse.FromString(message.SerializeToString()))
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides() -> AsyncIterator[Sides]:
    prepared = prepare("smollm2")
    config = EngineConfig(
        max_model_len=256,
        kv_cache_gib=0.1,
        max_num_seqs=8,
        dtype="float32",
        engine_args={"enable_prefix_caching": False},
    )
    engine, info = start_engine(config, prepared)
    model = common_pb2.ModelInfo(
        name="m", vocab_size=info.vocab_size, max_model_len=info.max_model_len, max_logprobs=info.max_logprobs
    )
    observer: Any = FakeObserver()
    servicer = ReplicaServicer(engine, replica_pb2.ReplicaSnapshot(model=model), "e0", observer)
    yield Sides(engine, servicer, model)
    await engine.stop_following()
    await asyncio.to_thread(engine.shutdown)


def seen(output: RequestOutput) -> dict[str, Any]:
    """All but the name and the clock."""
    fields = {name: value for name, value in vars(output).items() if name not in ("request_id", "metrics")}
    return fields | {"outputs": [vars(one) for one in output.outputs]}


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["city", "size"],
}
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(yes|no), [a-c]{3}"}}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
SEEDED: dict[str, Any] = {"seed": 5, "max_tokens": 12}


@pytest.mark.parametrize(
    "fields",
    [
        GREEDY,
        SEEDED | {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        SEEDED | {"n": 3, "logprobs": 2},
        GREEDY | {"logprobs": 3, "prompt_logprobs": 2},
        GREEDY | {"logprob_token_ids": [5, 7]},
        GREEDY | {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
        GREEDY | {"logit_bias": {260: -100.0, 339: 3.7}},
        GREEDY | {"allowed_token_ids": [1, 28, 30, 339]},
        GREEDY | {"bad_words": ["Paris"], "min_tokens": 12, "stop": ["."]},
        GREEDY | {"stop": [","], "include_stop_str_in_output": True},
        GREEDY | {"stop_token_ids": [28, 30]},
        GREEDY | {"detokenize": False, "logprobs": 0},
        GREEDY | {"skip_special_tokens": False, "ignore_eos": True, "spaces_between_special_tokens": False},
        GREEDY | {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 40},
        GREEDY | {"structured_outputs": StructuredOutputsParams(choice=["red", "blue"])},
        GREEDY | {"structured_outputs": StructuredOutputsParams(structural_tag=json.dumps(TAG))},
        GREEDY
        | {
            "allowed_token_ids": [28],
            "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3),
        },
    ],
    ids="-".join,
)
async def test_a_request_answers_the_same_by_both_ways(sides: Sides, fields: dict[str, Any]) -> None:
    params = SamplingParams(output_kind=FINAL_ONLY, **fields)
    (bare,) = await sides.bare(params)
    (carried,) = await sides.carried(params)
    if params.n > 1 and params.logprobs:
        same_but_for_rounding(carried, bare)
    assert seen(carried) == seen(bare)


def same_but_for_rounding(one: RequestOutput, other: RequestOutput) -> None:
    """Check log probabilities to 1e-4, and give `one` the other's.

    Which samples of a request share an engine step is chance, and a matmul of more rows rounds differently.
    """
    for mine, its in zip(one.outputs, other.outputs, strict=True):
        assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
        mine.cumulative_logprob = its.cumulative_logprob
        assert mine.logprobs is not None
        assert its.logprobs is not None
        for here, there in zip(mine.logprobs, its.logprobs, strict=True):
            for token, logprob in here.items():
                assert logprob.logprob == pytest.approx(there[token].logprob, abs=1e-4)
                logprob.logprob = there[token].logprob


async def test_deltas_add_up_to_the_whole_answer(sides: Sides) -> None:
    fields = GREEDY | {"logprobs": 1}
    (bare,) = await sides.bare(SamplingParams(output_kind=FINAL_ONLY, **fields))
    deltas = await sides.carried(SamplingParams(output_kind=RequestOutputKind.DELTA, **fields))
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.add(delta, aggregate=True)
    assert len(deltas) > 1
    assert seen(whole) == seen(bare)


async def test_whether_reasoning_has_ended_reaches_the_engine(sides: Sides) -> None:
    params = SamplingParams(
        output_kind=FINAL_ONLY, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"), **GREEDY
    )
    (constrained,) = await sides.carried(params, reasoning_ended=True)
    assert constrained.outputs[0].text.isdigit()


@pytest.mark.parametrize(
    "fields",
    [{"thinking_token_budget": 3}, {"logprob_token_ids": [10**8]}, {"trace_decode_token_ids": [28]}],
)
async def test_what_the_engine_refuses_is_refused_by_its_name(sides: Sides, fields: dict[str, Any]) -> None:
    wire = to_wire(SamplingParams(**fields))
    request = replica_pb2.ReplicaGenerateRequest(request_id="x", prompt_token_ids=PROMPT, sampling=wire)
    with pytest.raises(KvorumError) as refused:
        async for _ in sides.engine.generate(request):
            pass
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(fields)) in refused.value.message
