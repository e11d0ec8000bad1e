"""Nothing is lost between the wire and vLLM."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from protos import common_pb2
from protos.errors import KvorumError
from workers.translate import fill_prompt_logprobs, to_response, to_sampling_params

pytestmark = pytest.mark.engine

FIELDS: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 11, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "stop": ["a", "b"], "stop_token_ids": [3, 4],
    "include_stop_in_output": True, "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "n": 3,
    "logprobs": 4,
    "prompt_logprobs": 1, "skip_special_tokens": False, "logit_bias": {5: 1.5}, "bad_words": ["c"],
    "allowed_token_ids": [1, 2], "spaces_between_special_tokens": False,
}  # fmt: skip
RENAMED = {"include_stop_in_output": "include_stop_str_in_output"}


def test_every_wire_field_reaches_vllm() -> None:
    known = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    elsewhere = {"structured", "detokenize", "engine_json", "reasoning_ended"}
    elsewhere.add("reasoning_parser_kwargs_json")
    assert known == FIELDS.keys() | elsewhere, "a new wire field needs a line here"
    assert not to_sampling_params(common_pb2.SamplingParams(detokenize=False)).detokenize
    params = to_sampling_params(common_pb2.SamplingParams(**FIELDS))
    for name, value in FIELDS.items():
        assert getattr(params, RENAMED.get(name, name)) == value, name


def test_absent_fields_take_vllms_defaults() -> None:
    params, defaults = to_sampling_params(common_pb2.SamplingParams()), SamplingParams()
    for name in FIELDS.keys() - {"max_tokens"}:
        theirs = RENAMED.get(name, name)
        assert getattr(params, theirs) == getattr(defaults, theirs), name
    assert params.max_tokens is None  # what is left of the context
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("constraint", "attribute", "value"),
    [
        ({"json_schema": "{}"}, "json", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": common_pb2.StructuredOutput.Choices(option=["x", "y"])}, "choice", ["x", "y"]),
        ({"grammar": "root ::= 'a'"}, "grammar", "root ::= 'a'"),
        ({"json_object": True}, "json_object", True),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace", True),
        ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties", True),
        ({"regex": "a", "whitespace_pattern": "[ ]"}, "whitespace_pattern", "[ ]"),
    ],
)
def test_each_constraint_reaches_vllm(constraint: dict[str, Any], attribute: str, value: Any) -> None:
    wire = common_pb2.SamplingParams(structured=common_pb2.StructuredOutput(**constraint))
    assert getattr(to_sampling_params(wire).structured_outputs, attribute) == value


def test_a_constraint_without_a_kind_is_refused() -> None:
    wire = common_pb2.SamplingParams(structured=common_pb2.StructuredOutput(whitespace_pattern=" "))
    with pytest.raises(KvorumError) as refused:
        to_sampling_params(wire)
    assert refused.value.violations[0].field == "sampling.structured"


def test_what_vllm_refuses_names_the_field() -> None:
    with pytest.raises(KvorumError) as refused:
        to_sampling_params(common_pb2.SamplingParams(temperature=-3.0))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.violations[0].field == "sampling.temperature"


def test_a_step_becomes_one_message_with_every_delta() -> None:
    logprobs = [{8: Logprob(-2.0, 2, "b"), 7: Logprob(-1.0, 1, "a")}]
    outputs = [
        CompletionOutput(0, "b", [8], None, logprobs, finish_reason="stop", stop_reason="b"),
        CompletionOutput(1, "z", [9], None, None, finish_reason="length"),
        CompletionOutput(2, "q", [10], None, None, finish_reason="stop", stop_reason=10),
    ]
    response = to_response(RequestOutput("r", None, [1], None, outputs, finished=True))
    first, second, third = response.choices
    assert (first.index, first.text, list(first.token_ids), first.stop_string) == (0, "b", [8], "b")
    assert first.finish_reason == common_pb2.STOP
    (position,) = first.logprobs
    assert [(t.token_id, t.rank, t.decoded) for t in position.tokens] == [(8, 2, "b"), (7, 1, "a")]
    assert second.finish_reason == common_pb2.LENGTH
    assert not second.HasField("stop_string")
    assert third.stop_token_id == 10


def test_the_first_prompt_position_has_no_prediction() -> None:
    response = common_pb2.GenerateResponse()
    fill_prompt_logprobs(response, [4, 5], [None, {5: Logprob(-0.5, 1, "x")}])
    assert [len(position.tokens) for position in response.prompt_logprobs] == [0, 1]
