"""What Python callers pass, as the messages that routers take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from protos import common_pb2, inference_pb2

Message = Mapping[str, Any] | common_pb2.ChatMessage

_OPTIONS = frozenset(inference_pb2.RequestOptions.DESCRIPTOR.fields_by_name)
_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


class UnfitValueError(ValueError):
    """An argument that the message has no room for; it says which."""


def generate_request(
    prompt: str | Sequence[int] | None = None,
    *,
    messages: Iterable[Message] | None = None,
    tools: Iterable[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    model: str = "",
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A request for what follows a text, token ids, or a chat.

    Args:
        prompt: text or token ids; or give `messages`, with tools and template_kwargs: see `chat_prompt`.
        model: needed only when several are served.
        fields: of `SamplingParams` and `RequestOptions` by name, such as temperature=0, max_tokens=64,
            stop=["\\n"], logit_bias={5: -100.0}, structured=StructuredOutput(regex="[0-9]+"),
            session="s1", tenant="t1". None is as if not given.

    Raises:
        ValueError: not exactly one of prompt and messages, or an unknown field.
        UnfitValueError: a value that its field cannot hold.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    options = {name: fields.pop(name) for name in list(fields) if name in _OPTIONS}
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=_filled(common_pb2.SamplingParams(), fields),
        options=_filled(inference_pb2.RequestOptions(), options),
    )
    if isinstance(prompt, str):
        try:
            request.text = prompt
        except UnicodeEncodeError as error:
            raise UnfitValueError(f"prompt: not text that UTF-8 can carry: {error}") from None
    elif prompt is not None:
        request.tokens.ids.extend(prompt)
    else:
        request.chat.CopyFrom(chat_prompt(messages or (), tools, template_kwargs))
    return request


def chat_prompt(
    messages: Iterable[Message],
    tools: Iterable[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> inference_pb2.ChatPrompt:
    """Messages, tools and calls as OpenAI's API writes them, as a ChatPrompt; keys keep their order.

    A message's `content` may be None; its `reasoning_content` may also be called `reasoning`.

    Raises:
        ValueError: a message has a key that ChatMessage does not know, or a value is no JSON object.
    """
    chat = inference_pb2.ChatPrompt()
    for i, message in enumerate(messages):
        if isinstance(message, common_pb2.ChatMessage):
            chat.messages.append(message)
        else:
            chat.messages.append(_message(f"messages[{i}]", message))
    chat.tools_json.extend(_json(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    if template_kwargs:
        chat.template_kwargs_json = _json("template_kwargs", template_kwargs)
    return chat


def _message(path: str, plain: Mapping[str, Any]) -> common_pb2.ChatMessage:
    fields = {key: value for key, value in plain.items() if value is not None}
    calls = fields.pop("tool_calls", ())
    if "reasoning" in fields:  # vLLM's newer name; where both are given it counts
        fields["reasoning_content"] = fields.pop("reasoning")
    try:
        message: common_pb2.ChatMessage = json_format.ParseDict(fields, common_pb2.ChatMessage())
    except json_format.ParseError as error:
        raise ValueError(f"{path}: {error}") from None
    message.tool_calls_json.extend(_json(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls))
    return message


def _json(path: str, plain: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(plain), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a JSON object: {error}") from None


def _filled(message: Any, fields: Mapping[str, Any]) -> Any:
    unknown = sorted(fields.keys() - _SAMPLING - _OPTIONS)
    if unknown:
        known = ", ".join(sorted(_SAMPLING | _OPTIONS))
        raise ValueError(f"unknown field {unknown[0]}; there are: {known}")
    for name, value in fields.items():
        if value is None:
            continue
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (ValueError, TypeError) as error:
            raise UnfitValueError(f"{name}: {value!r} does not fit: {error}") from None
    return message
