"""Sampling parameters reach a replica's vLLM as vLLM's API server made them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from cluster.openai.params import NOT_CARRIED, REFUSED, to_wire
from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from router import validate
from workers.engine import Engine
from workers.translate import to_reasoning_parser_kwargs, to_sampling_params

MODEL = common_pb2.ModelInfo(name="m", max_model_len=4096, vocab_size=1000, max_logprobs=20)

# One value of each field that is not vLLM's default.
VALUES: dict[str, Any] = {
    "n": 3, "presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5,
    "temperature": 0.75, "watermarking": False, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 11,
    "stop": ["halt", "é"], "stop_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 9, "min_tokens": 2,
    "logprobs": 2, "prompt_logprobs": 0, "logprob_token_ids": [5, 6], "detokenize": False,
    "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True, "stream_interval": 4,
    "structured_outputs": StructuredOutputsParams(regex="a+", disable_any_whitespace=True),
    "logit_bias": {5: -1.5, 6: 100.0}, "allowed_token_ids": [1, 2], "bad_words": ["no", "never"],
    "extra_args": {"a": [1, 1.5, "x", None, True], "b": {"c": "d"}}, "skip_reading_prefix_cache": True,
    "thinking_token_budget": 0,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=2, min_count=3),
    "trace_decode_token_ids": [7, 8],
}  # fmt: skip
CARRIED = sorted(VALUES)


def carried(params: SamplingParams, **options: Any) -> SamplingParams:
    """What a replica makes of them, having come as bytes and passed the router."""
    wire = common_pb2.SamplingParams.FromString(to_wire(params, **options).SerializeToString())
    validate.sampling(wire, MODEL, prompt_tokens=10, max_n=8)
    return to_sampling_params(wire)


def fields(params: SamplingParams) -> dict[str, Any]:
    found = {name: getattr(params, name) for name in CARRIED}
    for name in ("structured_outputs", "repetition_detection"):
        if found[name] is not None:
            found[name] = dataclasses.asdict(found[name])
    return found


def test_every_field_of_vllms_parameters_is_carried_or_has_a_reason_not_to_be() -> None:
    ours = [*VALUES, *NOT_CARRIED, *REFUSED]
    assert sorted(ours) == sorted(SamplingParams.__struct_fields__), "vLLM has changed its parameters"
    defaults = SamplingParams()
    assert not [name for name, value in VALUES.items() if value == getattr(defaults, name)]


@pytest.mark.parametrize("name", CARRIED)
def test_each_field_reaches_the_replica(name: str) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **{name: VALUES[name]})
    assert fields(carried(params)) == fields(params)


@given(st.sets(st.sampled_from(CARRIED)))
def test_any_fields_together_reach_the_replica(names: set[str]) -> None:
    if "detokenize" in names:
        names.discard("stop")  # vLLM refuses them together
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **{name: VALUES[name] for name in names})
    assert fields(carried(params)) == fields(params)


def test_vllms_defaults_leave_everything_but_max_tokens_absent() -> None:
    assert to_wire(SamplingParams()) == common_pb2.SamplingParams(max_tokens=16)
    assert carried(SamplingParams(max_tokens=None)).max_tokens is None


def test_zeros_are_carried_where_zero_is_not_the_default() -> None:
    params = carried(SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0))
    assert (params.temperature, params.logprobs, params.prompt_logprobs) == (0.0, 0, 0)


def test_numbers_are_as_the_sampler_rounds_them() -> None:
    assert carried(SamplingParams(temperature=0.7)).temperature == pytest.approx(0.7, rel=1e-7)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": '{"type": "object"}'},
        {"regex": ""},
        {"choice": ["x", "y"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
        {"json": "{}", "whitespace_pattern": "[ ]?", "disable_additional_properties": True},
    ],
)
def test_each_constraint_reaches_the_replica(constraint: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    assert fields(carried(params)) == fields(params)


def test_a_schema_given_as_an_object_becomes_its_text_in_its_order() -> None:
    schema = {"properties": {"z": {"type": "integer"}, "a": {"const": 1.0}}, "type": "object"}
    params = carried(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert list(json.loads(params.structured_outputs.json)["properties"]) == ["z", "a"]
    assert json.loads(params.structured_outputs.json) == schema


@pytest.mark.parametrize("ended", [None, False, True])
def test_whether_reasoning_has_ended_is_carried(ended: bool | None) -> None:
    wire = to_wire(SamplingParams(), reasoning_ended=ended)
    assert (wire.reasoning_ended if wire.HasField("reasoning_ended") else None) is ended


@pytest.mark.parametrize("kwargs", [None, {}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_what_the_reasoning_parser_is_given_reaches_the_replica(kwargs: dict[str, Any] | None) -> None:
    wire = to_wire(SamplingParams(), reasoning_parser_kwargs=kwargs)
    expected = None if kwargs is None else {"chat_template_kwargs": None} | kwargs
    assert to_reasoning_parser_kwargs(wire) == expected


def test_what_the_reasoning_parser_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(VLLMValidationError) as caught:
        to_wire(SamplingParams(), reasoning_parser_kwargs={"chat_template_kwargs": {"x": object()}})
    assert caught.value.parameter == "chat_template_kwargs"


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"tokenizer": 1}', '{"chat_template_kwargs": "no"}', "[" * 5000 + "]" * 5000]
)
def test_a_replica_refuses_what_would_break_its_reasoning_parser(text: str) -> None:
    with pytest.raises(KvorumError) as caught:
        to_reasoning_parser_kwargs(common_pb2.SamplingParams(reasoning_parser_kwargs_json=text))
    assert caught.value.violations[0].field == "sampling.reasoning_parser_kwargs_json"


async def test_the_engine_gives_it_to_vllm() -> None:
    given: dict[str, Any] = {}

    async def generate(*_: Any, **named: Any) -> AsyncIterator[Any]:
        given.update(named)
        yield SimpleNamespace()

    config: Any = SimpleNamespace(lora_modules={})
    prepared: Any = SimpleNamespace(revision="r1")
    placement: Any = SimpleNamespace()
    engine = Engine(config, prepared, placement)
    llm: Any = SimpleNamespace(generate=generate)
    engine._llm = llm
    kwargs = {"chat_template_kwargs": {"thinking": True}}
    request = replica_pb2.ReplicaGenerateRequest(
        prompt_token_ids=[1], sampling=to_wire(SamplingParams(), reasoning_parser_kwargs=kwargs)
    )
    assert len([output async for output in engine.generate(request)]) == 1
    assert given["reasoning_parser_kwargs"] == kwargs


def test_a_replica_always_streams_deltas_and_sends_a_whole_answer_in_fewer_messages() -> None:
    streamed = carried(SamplingParams(output_kind=RequestOutputKind.DELTA))
    whole = carried(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    growing = carried(SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, stream_interval=4))
    for params in (streamed, whole, growing):
        assert params.output_kind is RequestOutputKind.DELTA
    assert streamed.stream_interval is None
    assert growing.stream_interval is None  # as in vLLM, which puts out each step then
    assert whole.stream_interval is not None
    assert whole.stream_interval > 1


def test_more_top_k_than_any_vocabulary_has_is_off_and_not_refused() -> None:
    assert carried(SamplingParams(top_k=2**40)).top_k > MODEL.vocab_size


@pytest.mark.parametrize(
    ("given_fields", "parameter"),
    [
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"extra_args": {"x": float("nan")}}, "extra_args"),
        ({"extra_args": {"x": object()}}, "extra_args"),
        ({"structured_outputs": StructuredOutputsParams(regex="\ud800")}, "structured_outputs"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 1}, "prompt_logprob_start"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(given_fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        to_wire(SamplingParams(**given_fields))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ('{"warp": 1}', "sampling.engine_json", "warp"),
        ('{"logprob_token_ids": "12"}', "sampling.engine_json", "logprob_token_ids"),
        ('{"logprob_token_ids": [1.5]}', "sampling.engine_json", "logprob_token_ids"),
        ('{"repetition_detection": {"max": 1}}', "sampling.engine_json", "max"),
        ('{"temperature": 1}', "sampling.engine_json", "temperature"),
        ("[1]", "sampling.engine_json", "object"),
        ("{", "sampling.engine_json", ""),
        ('{"extra_args": ' + "[" * 5000 + "]" * 5000 + "}", "sampling.engine_json", ""),
        ('{"stream_interval": 0}', "sampling.stream_interval", "at least 1"),
        ('{"extra_args": {"kv_transfer_params": {}}}', "sampling.kv_transfer_params", "not supported"),
        ('{"extra_args": {"ec_transfer_params": {}}}', "sampling.ec_transfer_params", "not supported"),
        ('{"repetition_detection": {"max_pattern_size": 2}}', "sampling", "min_count"),
    ],
)
def test_a_replica_refuses_what_engine_json_must_not_hold(text: str, field: str, words: str) -> None:
    with pytest.raises(KvorumError) as refused:
        to_sampling_params(common_pb2.SamplingParams(engine_json=text))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.violations[0].field == field
    assert words in refused.value.message
