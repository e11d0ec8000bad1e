"""Chat templates, rendered as vLLM 0.32 renders them (`vllm/renderers/hf.py`, `chat_utils.py`, and the
Jinja environment of `transformers/utils/chat_template_utils.py`), without importing either.

The template is the operator's; messages, tools and template arguments are the user's. Templates run
in Jinja's immutable sandbox.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from protos import common_pb2
from protos.errors import invalid
from router.json_text import parse_arguments, parse_object

MESSAGES = "chat.messages"
TEMPLATE_KWARGS = "chat.template_kwargs_json"

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Set by the router or by the model; a user's value would be ignored or break the call.
_RESERVED_KWARGS = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_assistant_tokens_mask"}
)
_BILLING_HEADER = "x-anthropic-billing-header"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own, its trailing space included

Message = dict[str, Any]


class ChatTemplate:
    """One model's template, compiled once.

    Args:
        text: the Jinja source; empty for a model without a template.
        special_tokens: bos_token, eos_token and so on, visible to the template.
        content_format: "string", or "openai" when the template iterates over content parts.

    Raises:
        ValueError: the template does not compile.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], content_format: str) -> None:
        self._text = text
        self._special_tokens = dict(special_tokens)
        self._parts = content_format == "openai"
        environment = _environment()
        try:
            self._template = environment.from_string(text)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        self._knows_developer = '"developer"' in text or "'developer'" in text

    def render(
        self,
        messages: Sequence[common_pb2.ChatMessage],
        *,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt text.

        Raises:
            KvorumError: INVALID_ARGUMENT, naming the field, when the model has no template, a message
                or argument is out of order, or the template itself refuses.
        """
        if not self._text:
            raise invalid(MESSAGES, "the model has no chat template: send text or token ids instead")
        if not messages:
            raise invalid(MESSAGES, "at least one message is needed", common_pb2.PROMPT_EMPTY)
        if continue_final_message and add_generation_prompt:
            raise invalid("chat.continue_final_message", "needs add_generation_prompt to be false")
        if reserved := sorted(_RESERVED_KWARGS & template_kwargs.keys()):
            raise invalid(TEMPLATE_KWARGS, f"{', '.join(reserved)} cannot be set here")
        conversation = self._conversation(messages)
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **{key: value for key, value in template_kwargs.items() if key in self._variables},
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return self._run(variables)
        return self._run_continued(variables, conversation)

    def _conversation(self, messages: Sequence[common_pb2.ChatMessage]) -> list[Message]:
        parsed = [self._message(index, message) for index, message in enumerate(messages)]
        if not self._knows_developer and any(message["role"] == "developer" for message in parsed):
            parsed = _systems_first([_as_system(message) for message in parsed])
        return parsed

    def _message(self, index: int, message: common_pb2.ChatMessage) -> Message:
        role = message.role
        known = role in _ROLES or (role and (f"'{role}'" in self._text or f'"{role}"' in self._text))
        if not known:
            roles = ", ".join(sorted(_ROLES))
            raise invalid(f"{MESSAGES}[{index}].role", f"'{role}' is not a role; one of: {roles}")
        texts = [message.content] if message.HasField("content") else []
        if role == "system":
            texts = _without_billing_header(texts)
        content: Any = "\n".join(texts)
        if self._parts and role != "tool":  # tool results are strings in either format
            content = [{"type": "text", "text": text} for text in texts]
        parsed: Message = {"role": role, "content": content}
        if calls := _tool_calls(f"{MESSAGES}[{index}].tool_calls_json", message, role):
            parsed["tool_calls"] = calls
        if role == "assistant" and message.HasField("reasoning_content"):
            parsed["reasoning"] = parsed["reasoning_content"] = message.reasoning_content
        if role == "tool" and message.HasField("tool_call_id"):
            parsed["tool_call_id"] = message.tool_call_id
        if message.HasField("name"):
            parsed["name"] = message.name
        if role == "developer":
            parsed["tools"] = None
        return parsed

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(**variables)
        except Exception as error:
            # A template is a program: whatever it runs into, this request's messages led it there.
            raise invalid(MESSAGES, f"the chat template refused them: {error}") from error

    def _run_continued(self, variables: dict[str, Any], conversation: list[Message]) -> str:
        """As transformers does: mark the end of the last message, render, cut at the mark."""
        if "content" not in self._text:
            raise invalid("chat.continue_final_message", "the model's chat template does not show content")
        marked = copy.deepcopy(conversation)
        holder, key = marked[-1], "content"
        if isinstance(holder[key], list):
            if not holder[key]:
                raise invalid("chat.continue_final_message", "the final message has no text to continue")
            holder, key = holder[key][-1], "text"
        final: str = holder[key]
        holder[key] = final + _CONTINUE_TAG
        rendered = self._run({**variables, "messages": marked})
        if final.strip() not in rendered or _CONTINUE_TAG.strip() not in rendered:
            raise invalid(
                "chat.continue_final_message", "the chat template drops or alters the final message"
            )
        end = rendered.rindex(_CONTINUE_TAG.strip())
        if rendered[end : end + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
            return rendered[:end]
        return rendered[:end].rstrip()  # the template trims, so the space before the mark is ours


def _without_billing_header(texts: list[str]) -> list[str]:
    """vLLM drops this line, whose value changes on every request and would defeat the prefix cache."""
    if not texts or not texts[0].startswith(_BILLING_HEADER):
        return texts
    rest = texts[0].partition("\n")[2]
    return [rest] if rest else []


def _tool_calls(path: str, message: common_pb2.ChatMessage, role: str) -> list[dict[str, Any]]:
    """An assistant's calls as templates expect them; other roles have none, but theirs must be JSON too."""
    texts = message.tool_calls_json
    calls = [parse_object(f"{path}[{i}]", text) for i, text in enumerate(texts)]
    if role != "assistant":
        return []
    return [_with_parsed_arguments(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _with_parsed_arguments(path: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid(path, "only calls of type 'function' with a function object are known")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_arguments(f"{path}.function.arguments", arguments)
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return call


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in {**message, "role": "system"}.items() if key != "tools"}


def _systems_first(messages: list[Message]) -> list[Message]:
    """One system message in front, when there are several or one stands elsewhere."""
    places = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if places in ([], [0]):
        return messages
    texts = [_text_of(messages[index]["content"]) for index in places]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_transparent")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _transparent(self, caller: Any) -> Any:
        return caller()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers gives it
