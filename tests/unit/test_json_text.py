"""JSON in the fields of a request, from the client's dicts to what the template gets."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes_router import running_stack
from fakes_tokenizer import FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st

from protos import admin_pb2, common_pb2, inference_pb2, inference_pb2_grpc
from protos.errors import KvorumError, from_rpc_error
from router import prompt
from router.client_request import chat_prompt
from router.json_text import MAX_NESTING, parse_arguments, parse_object

OBJECTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
)


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def refusal(text: str) -> str:
    with pytest.raises(KvorumError) as caught:
        parse_object("chat.tools_json[1]", text)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = caught.value.violations
    assert violation.field == "chat.tools_json[1]"
    return violation.description


def exactly(value: Any) -> str:
    """Tells 1 from 1.0 and one order of keys from another, which == does not."""
    return repr(value)


@given(tool=OBJECTS, call=OBJECTS, kwargs=OBJECTS)
def test_tools_calls_and_template_arguments_arrive_as_they_were_sent(
    tool: dict[str, Any], call: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    sent = chat_prompt([{"role": "assistant", "content": None, "tool_calls": [call]}], [tool], kwargs)
    chat = inference_pb2.ChatPrompt.FromString(sent.SerializeToString())
    assert exactly(parse_object("x", chat.tools_json[0])) == exactly(tool)
    assert exactly(parse_object("x", chat.messages[0].tool_calls_json[0])) == exactly(call)
    assert exactly(parse_object("x", chat.template_kwargs_json)) == exactly(kwargs)
    assert not chat.messages[0].HasField("content")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{'a': 1}", "is not JSON"),
        ('{"a": 1} {}', "is not JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": ' + "9" * 10_000 + "}", "digits"),
        ("[]", "must be a JSON object, got list"),
        ("null", "must be a JSON object, got NoneType"),
        ('"{}"', "must be a JSON object, got str"),
        (nested(MAX_NESTING + 1), "nests deeper than 64 levels"),
        (nested(1_000_000), "nests deeper than 64 levels"),
        ('{"\\udfff": 1}', "surrogate"),
    ],
)
def test_what_is_no_plain_object_is_refused_by_field(text: str, words: str) -> None:
    assert words in refusal(text)


def test_as_many_levels_as_allowed_and_whole_surrogate_pairs_are_read() -> None:
    assert parse_object("x", nested(MAX_NESTING))
    assert parse_object("x", '{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "42", "null", '"{}"'])
def test_arguments_that_are_no_object_are_none_at_all(text: str) -> None:
    assert parse_arguments("x", text) == {}


async def test_a_chat_without_tools_and_arguments_gives_the_template_neither() -> None:
    class Recorder(FakeTokenizer):
        def encode_chat(self, messages: Any, **how: Any) -> tuple[list[int], str]:
            seen.append(how)
            return [1], ""

    seen: list[dict[str, Any]] = []
    await prompt.from_chat(
        chat_prompt([{"role": "user", "content": "x"}]), Recorder(admin_pb2.TokenizerBundle())
    )
    assert (seen[0]["tools"], seen[0]["template_kwargs"]) == (None, None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools_json": ["{}", "["]}, "chat.tools_json[1]"),
        ({"tools_json": ['{"a":' * 200_000]}, "chat.tools_json[0]"),
        ({"template_kwargs_json": "[1]"}, "chat.template_kwargs_json"),
    ],
)
async def test_bad_json_is_the_callers_mistake_over_the_wire(fields: dict[str, Any], field: str) -> None:
    message = common_pb2.ChatMessage(role="user", content="hi")
    chat = inference_pb2.ChatPrompt(messages=[message], **fields)
    async with running_stack() as stack, grpc.aio.insecure_channel(stack.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await anext(aiter(stub.Chat(inference_pb2.ChatRequest(chat=chat), timeout=5)))
        with pytest.raises(grpc.aio.AioRpcError) as tokenized:
            await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat), timeout=5)
    for caught in (streamed, tokenized):
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": ["f"]}]},
            r"messages\[0\].tool_calls\[0\]",
        ),
        ({"messages": [{"role": "user", "content": [1]}]}, r"messages\[0\]"),
        ({"messages": [], "tools": [{}, {"a": object()}]}, r"tools\[1\]"),
        ({"messages": [], "template_kwargs": {"a": float("nan")}}, "template_kwargs"),
    ],
)
def test_the_client_refuses_what_is_no_json(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat_prompt(**arguments)


def test_the_client_takes_an_assistant_message_as_openais_api_gives_it() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2.0}'}}
    given = {"role": "assistant", "content": None, "refusal": None, "reasoning": "hm", "tool_calls": [call]}
    (message,) = chat_prompt([given]).messages
    assert json.loads(message.tool_calls_json[0]) == call
    message.ClearField("tool_calls_json")
    assert message == common_pb2.ChatMessage(role="assistant", reasoning_content="hm")
