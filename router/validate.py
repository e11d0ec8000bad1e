"""Every check that a request can fail before a replica sees it. Pure.

The ranges are vLLM's own (`vllm/sampling_params.py` 0.32, `SamplingParams._verify_args` and
`_validate_*`), so that what passes here passes there, plus bounds on sizes. Grammars, regular
expressions and JSON schemas are compiled in the replica, which alone has the compiler.

Each check raises KvorumError with INVALID_ARGUMENT and the path of the field in the proto.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import grpc
import numpy as np
from numpy.typing import NDArray

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError, invalid
from router import constraints
from router.json_text import parse_object

MAX_STOP_STRINGS = 64
MAX_STRING_CHARS = 1024
"""Of a stop string, a bad word, a choice's option or a cache salt."""
MAX_LIST_ITEMS = 1024
"""Of stop token ids, bad words and choices."""
MAX_JSON_CHARS = 64 * 1024
"""Of each field that is a JSON object whose content the replica alone knows."""
MAX_REQUEST_ID_CHARS = 128
MAX_NAME_CHARS = 256
"""Of a session and of a tenant."""

_GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS
_ENGINE_MAX_TEMPERATURE = 2.0


def prompt(token_ids: NDArray[np.int32], model: common_pb2.ModelInfo, field: str) -> None:
    """A prompt has tokens, all of the vocabulary, and leaves room for one more in the context."""
    if not len(token_ids):
        raise invalid(field, "the prompt has no token", common_pb2.PROMPT_EMPTY)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= model.vocab_size:
        outside = low if low < 0 else high
        raise invalid(field, f"token id {outside} is not in the vocabulary (0 to {model.vocab_size - 1})")
    if len(token_ids) >= model.max_model_len:
        raise invalid(
            field,
            f"the prompt has {len(token_ids)} tokens, the context of '{model.name}' is {model.max_model_len} "
            f"and one must be left to generate: at most {model.max_model_len - 1}",
            common_pb2.PROMPT_TOO_LONG,
        )


def sampling(
    params: common_pb2.SamplingParams, model: common_pb2.ModelInfo, *, prompt_tokens: int, max_n: int
) -> None:
    """All of SamplingParams. `prompt_tokens` is the prompt's length, `max_n` this router's limit on n."""
    _numbers(params, max_n)
    _lengths(params, model.max_model_len - prompt_tokens)
    _logprobs(params, model)
    _strings("sampling.stop", params.stop, MAX_STOP_STRINGS)
    _strings("sampling.bad_words", params.bad_words, MAX_LIST_ITEMS)
    _token_ids("sampling.stop_token_ids", params.stop_token_ids, model, MAX_LIST_ITEMS)
    _token_ids("sampling.allowed_token_ids", params.allowed_token_ids, model, model.vocab_size)
    _token_ids("sampling.logit_bias", params.logit_bias, model, MAX_LIST_ITEMS)
    for token, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise invalid("sampling.logit_bias", f"the bias of token {token} must be finite, got {bias}")
    if params.stop and params.HasField("detokenize") and not params.detokenize:
        raise invalid("sampling.stop", "cannot be looked for with detokenize off")
    if params.engine_json:
        _json_object("sampling.engine_json", params.engine_json)
    if params.HasField("reasoning_parser_kwargs_json"):
        _json_object("sampling.reasoning_parser_kwargs_json", params.reasoning_parser_kwargs_json)
    if params.HasField("structured"):
        constraints.check(params.structured)


def room(params: common_pb2.SamplingParams, model: common_pb2.ModelInfo, prompt_tokens: int) -> int:
    """Most tokens one sequence may generate: max_tokens, or what is left of the context."""
    left = model.max_model_len - prompt_tokens
    return params.max_tokens if params.HasField("max_tokens") else left


def sequences(params: common_pb2.SamplingParams) -> int:
    """How many sequences are asked for."""
    return params.n if params.HasField("n") else 1


def options(requested: inference_pb2.RequestOptions, model: common_pb2.ModelInfo) -> None:
    """Request id, cache salt, session, tenant, class and LoRA name.

    Raises:
        KvorumError: INVALID_ARGUMENT, or NOT_FOUND for an adapter that `model` does not have.
    """
    request_id = requested.request_id
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isprintable() and request_id.isascii()):
        raise invalid(
            "options.request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        )
    if len(requested.cache_salt) > MAX_STRING_CHARS:
        raise invalid("options.cache_salt", f"must have at most {MAX_STRING_CHARS} characters")
    for name, value in (("session", requested.session), ("tenant", requested.tenant)):
        if len(value) > MAX_NAME_CHARS:
            raise invalid(f"options.{name}", f"has {len(value)} characters, at most {MAX_NAME_CHARS}")
    if requested.service_class not in inference_pb2.ServiceClass.values():
        known = ", ".join(inference_pb2.ServiceClass.keys())
        raise invalid("options.service_class", f"{requested.service_class} is none of: {known}")
    if requested.lora and requested.lora not in model.lora_adapters:
        there = ", ".join(sorted(model.lora_adapters)) or "none"
        message = f"model '{model.name}' has no LoRA adapter '{requested.lora}'; there is: {there}"
        raise KvorumError(grpc.StatusCode.NOT_FOUND, common_pb2.LORA_NOT_FOUND, message)


def _numbers(params: common_pb2.SamplingParams, max_n: int) -> None:
    _within(params, "temperature", 0.0, _ENGINE_MAX_TEMPERATURE)
    _within(params, "min_p", 0.0, 1.0)
    _within(params, "presence_penalty", -2.0, 2.0)
    _within(params, "frequency_penalty", -2.0, 2.0)
    if params.HasField("top_p") and not 0.0 < params.top_p <= 1.0:
        raise invalid("sampling.top_p", f"must be in (0, 1], got {params.top_p:g}")
    if params.HasField("top_k") and params.top_k < -1:
        raise invalid("sampling.top_k", f"must be at least 1, or 0 or -1 for off, got {params.top_k}")
    penalty = params.repetition_penalty
    if params.HasField("repetition_penalty") and not (0.0 < penalty < math.inf):
        raise invalid("sampling.repetition_penalty", f"must be finite and above 0, got {penalty:g}")
    if params.HasField("n") and not 1 <= params.n <= max_n:
        raise invalid("sampling.n", f"must be in [1, {max_n}], got {params.n}")
    greedy = params.HasField("temperature") and params.temperature < _GREEDY_BELOW
    if greedy and sequences(params) > 1:
        raise invalid(
            "sampling.n",
            f"must be 1 at temperature {params.temperature:g}: {params.n} greedy sequences would be equal",
        )


def _within(params: common_pb2.SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(params, name)  # 0 when absent, which every range here holds
    if not low <= value <= high:  # NaN is within nothing
        raise invalid(f"sampling.{name}", f"must be in [{low:g}, {high:g}], got {value:g}")


def _lengths(params: common_pb2.SamplingParams, left: int) -> None:
    if params.HasField("max_tokens"):
        if params.max_tokens < 1:
            raise invalid("sampling.max_tokens", f"must be at least 1, got {params.max_tokens}")
        if params.max_tokens > left:
            raise invalid(
                "sampling.max_tokens",
                f"is {params.max_tokens}, but the prompt leaves room for {left} in the context",
            )
    most = params.max_tokens if params.HasField("max_tokens") else left
    if not 0 <= params.min_tokens <= most:
        raise invalid("sampling.min_tokens", f"must be in [0, {most}] (max_tokens), got {params.min_tokens}")


def _logprobs(params: common_pb2.SamplingParams, model: common_pb2.ModelInfo) -> None:
    most = model.vocab_size if model.max_logprobs == -1 else model.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        wanted = model.vocab_size if asked == -1 else asked
        if asked < -1 or wanted > most:
            raise invalid(f"sampling.{name}", f"must be in [0, {most}], or -1 for all, got {asked}")


def _json_object(field: str, text: str) -> None:
    """A JSON object that is not too large; what is in it the replica knows, and refuses what it does not."""
    if len(text) > MAX_JSON_CHARS:
        raise invalid(field, f"has {len(text)} characters, at most {MAX_JSON_CHARS}")
    parse_object(field, text)


def _strings(field: str, values: Sequence[str], most: int) -> None:
    if len(values) > most:
        raise invalid(field, f"has {len(values)} entries, at most {most} are allowed")
    for i, value in enumerate(values):
        if not value:
            raise invalid(f"{field}[{i}]", "must not be empty")
        if len(value) > MAX_STRING_CHARS:
            raise invalid(f"{field}[{i}]", f"has {len(value)} characters, at most {MAX_STRING_CHARS}")


def _token_ids(field: str, ids: Iterable[int], model: common_pb2.ModelInfo, most: int) -> None:
    listed = list(ids)
    if len(listed) > most:
        raise invalid(field, f"has {len(listed)} entries, at most {most} are allowed")
    for token in listed:
        if not 0 <= token < model.vocab_size:
            raise invalid(field, f"token id {token} is not in the vocabulary (0 to {model.vocab_size - 1})")
