"""Bad input is refused at the router's edge, with the field that is at fault."""

from __future__ import annotations

import json
from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError
from router import validate

MODEL = common_pb2.ModelInfo(
    name="m", max_model_len=100, vocab_size=50, max_logprobs=5, lora_adapters=["poet", "lawyer"]
)


def refused(**fields: Any) -> KvorumError:
    """The refusal of SamplingParams with these fields, for a prompt of 90 tokens."""
    with pytest.raises(KvorumError) as caught:
        check(**fields)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value


def check(**fields: Any) -> None:
    validate.sampling(common_pb2.SamplingParams(**fields), MODEL, prompt_tokens=90, max_n=4)


def structured(**constraint: Any) -> common_pb2.StructuredOutput:
    return common_pb2.StructuredOutput(**constraint)


def tag(content: dict[str, Any]) -> common_pb2.StructuredOutput:
    """A structural tag around this format."""
    document = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    return structured(structural_tag=json.dumps(document))


CHOICES = common_pb2.StructuredOutput.Choices
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, NAN, INF]),
        ("top_p", [0.0, -0.5, 1.01, NAN]),
        ("top_k", [-2]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("presence_penalty", [-2.5, 2.5, NAN]),
        ("frequency_penalty", [-2.5, 2.5, -INF]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF]),
        ("n", [0, -1, 5]),
        ("max_tokens", [0, -3, 11]),
        ("min_tokens", [-1, 11]),
        ("logprobs", [-2, 6, -1]),
        ("prompt_logprobs", [-2, 6, -1]),
        ("stop_token_ids", [[50], [-1]]),
        ("allowed_token_ids", [[3, 50]]),
        ("logit_bias", [{50: 1.0}, {-1: 1.0}, {3: NAN}, {3: INF}]),
    ],
)
def test_value_out_of_range_names_its_field(field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(**{field: value})
        assert [v.field for v in error.violations] == [f"sampling.{field}"], value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "n": 1},
        {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "min_p": 1.0, "n": 4},
        {"top_k": 0, "seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"max_tokens": 10, "min_tokens": 10},
        {"min_tokens": 10},
        {"logprobs": 0, "prompt_logprobs": 5},
        {"stop": ["a"] * 64, "bad_words": ["x"], "stop_token_ids": [0, 49]},
        {"logit_bias": {49: -100.0}, "allowed_token_ids": [0]},
    ],
)
def test_edges_of_the_ranges_are_accepted(fields: dict[str, Any]) -> None:
    check(**fields)


def test_max_tokens_beyond_the_context_says_how_much_room_is_left() -> None:
    assert "room for 10 " in refused(max_tokens=11).message


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert refused(max_tokens=3, min_tokens=4).violations[0].field == "sampling.min_tokens"


def test_several_greedy_sequences_are_refused_as_in_vllm() -> None:
    assert refused(temperature=0.0, n=2).violations[0].field == "sampling.n"


def test_all_logprobs_are_accepted_where_the_model_allows_them() -> None:
    free = common_pb2.ModelInfo(name="m", max_model_len=100, vocab_size=50, max_logprobs=-1)
    params = common_pb2.SamplingParams(logprobs=-1, prompt_logprobs=50)
    validate.sampling(params, free, prompt_tokens=1, max_n=1)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_empty_string_is_named_by_its_place(field: str) -> None:
    assert refused(**{field: ["fine", ""]}).violations[0].field == f"sampling.{field}[1]"


def test_too_many_or_too_long_stop_strings_are_refused() -> None:
    assert refused(stop=["a"] * 65).violations[0].field == "sampling.stop"
    assert refused(stop=["a" * 1025]).violations[0].field == "sampling.stop[0]"


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (structured(), "sampling.structured"),
        (structured(json_schema=""), "sampling.structured.json_schema"),
        (structured(json_schema="{"), "sampling.structured.json_schema"),
        (structured(json_schema="[1]"), "sampling.structured.json_schema"),
        (structured(json_schema="[" * 100_000), "sampling.structured.json_schema"),
        (structured(json_schema='{"a":' * 70 + "1" + "}" * 70), "sampling.structured.json_schema"),
        (structured(choice=CHOICES()), "sampling.structured.choice"),
        (structured(choice=CHOICES(option=["a", ""])), "sampling.structured.choice[1]"),
        (
            structured(json_schema=json.dumps({"pattern": "(" * 65 + "a" + ")" * 65})),
            "sampling.structured.json_schema",
        ),
        (
            structured(json_schema=json.dumps({"patternProperties": {"a" * 3000: {}}})),
            "sampling.structured.json_schema",
        ),
        (
            structured(json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(300)}})),
            "sampling.structured.json_schema",
        ),
        (structured(regex="a|" * 2000), "sampling.structured.regex"),
        (structured(choice=CHOICES(option=[str(i) for i in range(300)])), "sampling.structured.choice"),
        (structured(choice=CHOICES(option=["x" * 20_000])), "sampling.structured.choice"),
        (structured(json_object=False), "sampling.structured.json_object"),
        (structured(regex="a\x00"), "sampling.structured.regex"),
        (structured(grammar=" \n"), "sampling.structured.grammar"),
        (structured(structural_tag=""), "sampling.structured.structural_tag"),
        (structured(structural_tag="[]"), "sampling.structured.structural_tag"),
        (structured(structural_tag='{"a": "' + "x" * 33_000 + '"}'), "sampling.structured.structural_tag"),
        (tag({"type": "regex", "pattern": "(" * 65}), "sampling.structured.structural_tag"),
        (tag({"type": "regex", "pattern": "\x00"}), "sampling.structured.structural_tag"),
        (tag({"type": "grammar", "grammar": "x" * 17_000}), "sampling.structured.structural_tag"),
        (
            tag({"type": "json_schema", "json_schema": {"properties": {f"p{i}": {} for i in range(300)}}}),
            "sampling.structured.structural_tag",
        ),
        (structured(regex="a", whitespace_pattern="\x00"), "sampling.structured.whitespace_pattern"),
        (structured(regex="a", whitespace_pattern="(" * 65), "sampling.structured.whitespace_pattern"),
    ],
)
def test_hollow_constraint_is_refused(constraint: common_pb2.StructuredOutput, field: str) -> None:
    assert refused(structured=constraint).violations[0].field == field


@pytest.mark.parametrize(
    "constraint",
    [
        structured(json_schema=json.dumps({"type": "object"})),
        structured(json_schema='{"a":' * 60 + "1" + "}" * 60),
        structured(choice=CHOICES(option=["yes", "no"])),
        structured(json_object=True),
        structured(regex=""),
        structured(grammar='root ::= "x"'),
        tag({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}),
        tag({"type": "json_schema", "json_schema": {"properties": {"grammar": {"type": "string"}}}}),
        structured(json_object=True, whitespace_pattern="[ ]?", disable_any_whitespace=True),
    ],
)
def test_sound_constraint_is_accepted(constraint: common_pb2.StructuredOutput) -> None:
    check(structured=constraint)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": NaN}', '{"a":' * 70 + "1" + "}" * 70, f'{{"a": "{"x" * 65_536}"}}']
)
@pytest.mark.parametrize("name", ["engine_json", "reasoning_parser_kwargs_json"])
def test_json_for_the_replica_is_an_object_of_bounded_size(name: str, text: str) -> None:
    assert refused(**{name: text}).violations[0].field == f"sampling.{name}"


def test_sound_engine_json_is_left_to_the_replica() -> None:
    check(engine_json='{"whatever": [1, 2.5, null]}')
    check(reasoning_parser_kwargs_json='{"chat_template_kwargs": {"enable_thinking": false}}')


def test_stop_strings_need_text_to_be_found_in() -> None:
    assert refused(stop=["a"], detokenize=False).violations[0].field == "sampling.stop"
    check(stop=["a"], detokenize=True)
    check(detokenize=False)


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(KvorumError) as caught:
        validate.prompt(np.array([], np.int32), MODEL, "text")
    assert caught.value.reason == common_pb2.PROMPT_EMPTY
    assert caught.value.violations[0].field == "text"


@pytest.mark.parametrize("bad", [50, -1])
def test_token_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(KvorumError) as caught:
        validate.prompt(np.array([1, bad, 2], np.int32), MODEL, "tokens.ids")
    assert f"token id {bad} " in caught.value.message
    assert caught.value.violations[0].field == "tokens.ids"


def test_prompt_must_leave_room_for_one_token() -> None:
    validate.prompt(np.ones(99, np.int32), MODEL, "text")
    with pytest.raises(KvorumError) as caught:
        validate.prompt(np.ones(100, np.int32), MODEL, "text")
    assert caught.value.reason == common_pb2.PROMPT_TOO_LONG
    assert "at most 99" in caught.value.message


def test_unknown_adapter_is_not_found_and_the_known_ones_are_listed() -> None:
    with pytest.raises(KvorumError) as caught:
        validate.options(inference_pb2.RequestOptions(lora="cook"), MODEL)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert caught.value.reason == common_pb2.LORA_NOT_FOUND
    assert "lawyer, poet" in caught.value.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request_id": "x" * 129}, "options.request_id"),
        ({"request_id": "a\nb"}, "options.request_id"),
        ({"request_id": "é"}, "options.request_id"),
        ({"cache_salt": "s" * 1025}, "options.cache_salt"),
    ],
)
def test_bad_option_names_its_field(options: dict[str, str], field: str) -> None:
    with pytest.raises(KvorumError) as caught:
        validate.options(inference_pb2.RequestOptions(**options), MODEL)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == field


def test_room_is_max_tokens_or_what_is_left_of_the_context() -> None:
    assert validate.room(common_pb2.SamplingParams(max_tokens=7), MODEL, 90) == 7
    assert validate.room(common_pb2.SamplingParams(), MODEL, 90) == 10
