"""vLLM's sampling parameters in the wire's fields; `workers.translate.to_sampling_params` reads them back.

A field at vLLM's default stays absent. Numbers become 32-bit floats, which is what vLLM's sampler makes of
them too. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from protos import common_pb2

_SAME_NAME = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_SINGULAR: Mapping[str, str] = MappingProxyType(
    {name: name for name in _SAME_NAME} | {"include_stop_str_in_output": "include_stop_in_output"}
)
"""vLLM's name to the wire's, of what is one value."""

_REPEATED = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")

_AS_JSON = (
    "watermarking", "logprob_token_ids", "stream_interval", "extra_args", "skip_reading_prefix_cache",
    "thinking_token_budget", "repetition_detection", "trace_decode_token_ids",
)  # fmt: skip
"""What the wire has no field of its own for."""

NOT_CARRIED: Mapping[str, str] = MappingProxyType(
    {
        "output_kind": "a replica always streams deltas; OutputAssembler makes the other kinds of them",
        "flat_logprobs": "how logprobs are held in memory, which OutputAssembler decides",
        "skip_clone": "whether this process may change the object",
        "routed_experts_prompt_start": "says which routed experts come back, and none do",
        "output_text_buffer_length": "follows from `stop`",
        "_eos_token_id": "the replica's engine sets it",
        "_all_stop_token_ids": "follows from `stop_token_ids`; the replica's engine adds to it",
        "_watermarking_skipped": "the replica's engine sets it",
        "_bad_words_token_ids": "the replica's engine makes them of `bad_words`",
    }
)
"""Fields that a replica need not know, and why."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "prompt_logprob_token_ids": "scores of chosen prompt tokens do not come back from a replica",
        "prompt_logprob_start": "scores of chosen prompt tokens do not come back from a replica",
    }
)
"""Fields whose effect would get lost, and why."""

_WHOLE_ANSWER_INTERVAL = 16
"""Tokens per message where only the whole answer is wanted: fewer messages, the same answer."""

_INT32_MAX = 2**31 - 1
_DEFAULTS = SamplingParams()


def to_wire(
    params: SamplingParams,
    *,
    reasoning_ended: bool | None = None,
    reasoning_parser_kwargs: dict[str, Any] | None = None,
) -> common_pb2.SamplingParams:
    """Everything of `params` that a replica needs to sample as vLLM would here.

    `reasoning_ended` and `reasoning_parser_kwargs` are those of `EngineClient.generate`.

    Raises:
        VLLMValidationError: a field holds what cannot be carried; it is named.
    """
    for name, why in REFUSED.items():
        if getattr(params, name) is not None:
            raise VLLMValidationError(f"{name} is not supported: {why}", parameter=name)
    wire = common_pb2.SamplingParams()
    for name, theirs in _SINGULAR.items():
        value = getattr(params, name)
        if value is not None and (value != getattr(_DEFAULTS, name) or name == "max_tokens"):
            _set(wire, theirs, name, value)
    _fill_lists(wire, params)
    if params.structured_outputs is not None:
        _fill_structured(wire.structured, params.structured_outputs)
    if further := _further(params):
        wire.engine_json = _json("extra_args", further)
    if reasoning_ended is not None:
        wire.reasoning_ended = reasoning_ended
    if reasoning_parser_kwargs is not None:
        wire.reasoning_parser_kwargs_json = _json("chat_template_kwargs", reasoning_parser_kwargs)
    return wire


def _set(wire: common_pb2.SamplingParams, theirs: str, name: str, value: Any) -> None:
    if name == "top_k":
        value = min(value, _INT32_MAX)  # more than any vocabulary has: off, as in vLLM
    try:
        setattr(wire, theirs, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise _uncarriable(name, error) from None


def _fill_lists(wire: common_pb2.SamplingParams, params: SamplingParams) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        # On the wire, as none given: every token would be allowed.
        raise VLLMValidationError("allowed_token_ids must not be empty", parameter="allowed_token_ids")
    for name in _REPEATED:
        try:
            getattr(wire, name).extend(getattr(params, name) or ())
        except (ValueError, TypeError, OverflowError) as error:
            raise _uncarriable(name, error) from None
    try:
        for token, bias in (params.logit_bias or {}).items():
            wire.logit_bias[token] = bias
    except (ValueError, TypeError, OverflowError) as error:
        raise _uncarriable("logit_bias", error) from None


def _fill_structured(wire: common_pb2.StructuredOutput, wanted: StructuredOutputsParams) -> None:
    wire.SetInParent()  # without a constraint it is for the router to refuse
    try:
        if wanted.json is not None:
            document = wanted.json
            wire.json_schema = document if isinstance(document, str) else json.dumps(document)
        elif wanted.regex is not None:
            wire.regex = wanted.regex
        elif wanted.choice is not None:
            wire.choice.SetInParent()
            wire.choice.option.extend(wanted.choice)
        elif wanted.grammar is not None:
            wire.grammar = wanted.grammar
        elif wanted.json_object is not None:
            wire.json_object = wanted.json_object
        elif wanted.structural_tag is not None:
            wire.structural_tag = wanted.structural_tag
        wire.disable_any_whitespace = wanted.disable_any_whitespace
        wire.disable_additional_properties = wanted.disable_additional_properties
        wire.whitespace_pattern = wanted.whitespace_pattern or ""
    except (ValueError, TypeError, RecursionError) as error:
        raise _uncarriable("structured_outputs", error) from None


def _further(params: SamplingParams) -> dict[str, Any]:
    fields = {name: value for name in _AS_JSON if (value := getattr(params, name)) is not None}
    # vLLM derives it where it is not given, and so will the replica.
    if fields.get("skip_reading_prefix_cache") == (params.prompt_logprobs is not None):
        del fields["skip_reading_prefix_cache"]
    if (detection := fields.get("repetition_detection")) is not None:
        fields["repetition_detection"] = dataclasses.asdict(detection)
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        fields.pop("stream_interval", None)  # vLLM has no effect of it here: each step is put out
    elif params.output_kind is RequestOutputKind.FINAL_ONLY:
        fields["stream_interval"] = max(params.stream_interval or 1, _WHOLE_ANSWER_INTERVAL)
    return fields


def _json(name: str, fields: dict[str, Any]) -> str:
    """`name`: the one field of these that holds what clients chose freely, so that it is at fault."""
    try:
        return json.dumps(fields, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise _uncarriable(name, error) from None


def _uncarriable(name: str, error: Exception) -> VLLMValidationError:
    return VLLMValidationError(f"{name} cannot be sent to a replica: {error}", parameter=name)
