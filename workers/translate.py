"""Between the wire's messages and vLLM's objects. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from protos import common_pb2
from protos.errors import FieldViolation, KvorumError, invalid

_FINISH = {
    "stop": common_pb2.STOP,
    "length": common_pb2.LENGTH,
    "abort": common_pb2.ABORT,
    "error": common_pb2.ERROR,
    "repetition": common_pb2.REPETITION,
}

# Wire names that differ from vLLM's.
_RENAMED = {"include_stop_in_output": "include_stop_str_in_output"}
_REPEATED = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_SINGULAR = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "include_stop_in_output", "ignore_eos", "max_tokens", "min_tokens", "n",
    "logprobs", "prompt_logprobs", "skip_special_tokens", "detokenize", "spaces_between_special_tokens",
)  # fmt: skip
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of extra_args by which a client could make an engine fetch from where it says."""


class _Repetition(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's RepetitionDetectionParams, its types checked."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class _ParserArguments(msgspec.Struct, forbid_unknown_fields=True):
    """What vLLM's server gives a reasoning parser; an engine would die of what a parser does not take."""

    chat_template_kwargs: dict[str, Any] | None = None


class _Further(msgspec.Struct, forbid_unknown_fields=True):
    """What `engine_json` may hold. vLLM's SamplingParams checks no types, and its engine trusts them."""

    watermarking: bool | None = None
    logprob_token_ids: list[int] | None = None
    stream_interval: int | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: _Repetition | None = None
    trace_decode_token_ids: list[int] | None = None


def to_sampling_params(wire: common_pb2.SamplingParams) -> SamplingParams:
    """vLLM's parameters; an absent field takes the OpenAI API's default.

    Raises:
        KvorumError: INVALID_ARGUMENT naming the field that vLLM refused.
    """
    values: dict[str, Any] = {"max_tokens": None, "output_kind": RequestOutputKind.DELTA}
    for name in _SINGULAR:
        if wire.HasField(name):  # type: ignore[arg-type]
            values[_RENAMED.get(name, name)] = getattr(wire, name)
    for name in _REPEATED:
        if items := list(getattr(wire, name)):
            values[name] = items
    if wire.logit_bias:
        values["logit_bias"] = dict(wire.logit_bias)
    try:
        if wire.engine_json:
            values |= _further(wire.engine_json)
        if wire.HasField("structured"):
            values["structured_outputs"] = _structured(wire.structured)
        params = SamplingParams(**values)
    except (VLLMValidationError, ValueError, TypeError) as error:
        raise refusal(error) from error
    params.skip_clone = True
    return params


def _further(text: str) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(text, type=_Further)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("sampling.engine_json", str(error)) from None
    fields = {name: value for name in read.__struct_fields__ if (value := getattr(read, name)) is not None}
    for name in _TRANSFERS:
        if name in (read.extra_args or {}):
            raise invalid(f"sampling.{name}", "is not supported: the cluster itself moves what engines share")
    if read.repetition_detection is not None:
        fields["repetition_detection"] = RepetitionDetectionParams(
            **msgspec.structs.asdict(read.repetition_detection)
        )
    return fields


def to_reasoning_parser_kwargs(wire: common_pb2.SamplingParams) -> dict[str, Any] | None:
    """What `AsyncLLM.generate` takes by that name; None when nothing was said.

    Raises:
        KvorumError: INVALID_ARGUMENT, it is no JSON object or holds what reasoning parsers do not take.
    """
    if not wire.HasField("reasoning_parser_kwargs_json"):
        return None
    try:
        read = msgspec.json.decode(wire.reasoning_parser_kwargs_json, type=_ParserArguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("sampling.reasoning_parser_kwargs_json", str(error)) from None
    return msgspec.structs.asdict(read)


def _structured(wire: common_pb2.StructuredOutput) -> StructuredOutputsParams:
    values: dict[str, Any] = {
        "disable_any_whitespace": wire.disable_any_whitespace,
        "disable_additional_properties": wire.disable_additional_properties,
        "whitespace_pattern": wire.whitespace_pattern or None,
    }
    kind = wire.WhichOneof("constraint")
    if kind == "json_schema":
        values["json"] = wire.json_schema
    elif kind == "choice":
        values["choice"] = list(wire.choice.option)
    elif kind is not None:
        values[kind] = getattr(wire, kind)
    return StructuredOutputsParams(**values)


def refusal(error: Exception) -> KvorumError:
    """INVALID_ARGUMENT from what vLLM raised, with the field when it names one."""
    parameter = getattr(error, "parameter", None)
    message = str(error.args[0] if error.args else error)
    field = f"sampling.{parameter}" if parameter else _guess_field(message)
    return KvorumError(
        grpc.StatusCode.INVALID_ARGUMENT,
        common_pb2.INVALID_REQUEST,
        f"{field}: {message}",
        (FieldViolation(field, message),),
    )


def _guess_field(message: str) -> str:
    """vLLM's grammar errors name no parameter; say which part of the request they speak of."""
    lowered = message.lower()
    if any(word in lowered for word in ("grammar", "schema", "regex", "structured", "guided", "choice")):
        return "sampling.structured"
    return "sampling"


def to_response(output: RequestOutput) -> common_pb2.GenerateResponse:
    """One step's deltas."""
    response = common_pb2.GenerateResponse()
    for completion in output.outputs:
        _fill_choice(response.choices.add(), completion)
    return response


def _fill_choice(choice: common_pb2.ChoiceDelta, completion: CompletionOutput) -> None:
    choice.index = completion.index
    choice.text = completion.text
    choice.token_ids.extend(completion.token_ids)
    if completion.finish_reason is not None:
        choice.finish_reason = _FINISH.get(completion.finish_reason, common_pb2.STOP)
        if isinstance(completion.stop_reason, str):
            choice.stop_string = completion.stop_reason
        elif completion.stop_reason is not None:
            choice.stop_token_id = completion.stop_reason
    if completion.logprobs:
        for position, token in zip(completion.logprobs, completion.token_ids, strict=False):
            _fill_position(choice.logprobs.add(), position or {}, token)


def fill_prompt_logprobs(
    response: common_pb2.GenerateResponse,
    prompt_token_ids: Sequence[int],
    positions: Sequence[Mapping[int, Logprob] | None],
) -> None:
    """One position per prompt token; the first has no prediction and stays empty."""
    for token, position in zip(prompt_token_ids, positions, strict=False):
        _fill_position(response.prompt_logprobs.add(), position or {}, token)


def _fill_position(wire: common_pb2.PositionLogprobs, position: Mapping[int, Logprob], chosen: int) -> None:
    ordered = sorted(position.items(), key=lambda item: (item[0] != chosen, item[1].rank or 0))
    for token, entry in ordered:
        wire.tokens.add(
            token_id=token, logprob=entry.logprob, rank=entry.rank or 0, decoded=entry.decoded_token or ""
        )
