"""The router's tokenizer and templates against transformers, on a small byte-level tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from protos import admin_pb2, common_pb2
from protos.errors import KvorumError
from router.client_request import chat_prompt
from router.tokenizer import Tokenizer

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
TOOLS = """
{%- if tools is not none %}
    {{- "tools:" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- call.function.name ~ (call.function.arguments | tojson(indent=1)) }}
        {%- endfor %}
    {%- endif %}
    {% generation %}
    {{- message.role }}: {{ message.content -}} ({{ message.name }})
    {% endgeneration %}
{%- endfor %}
{{- documents is none }} {{ thinking | default(false) }} {{ strftime_now("%%") }}
"""
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "[{{ m.role }}|{{ part.type }}|{{ part.text }}]"
    "{% endfor %}{% endfor %}"
)
PICKY = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user, <please>') }}{% endif %}"
    + CHATML
)
SPECIALS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What AutoTokenizer gives: adds BOS, and would truncate and pad if its file had its way."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(16)
    backend.enable_padding(length=16)
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@cache  # it proves itself at load, which takes some milliseconds
def from_reference(reference: Any, template: str = CHATML, content_format: str = "string") -> Tokenizer:
    bundle = admin_pb2.TokenizerBundle(
        tokenizer_json=reference.backend_tokenizer.to_str().encode(),
        chat_template=template,
        special_tokens=SPECIALS,
        content_format=content_format,
    )
    return Tokenizer.from_bundle(bundle)


def said(*turns: tuple[str, str]) -> list[common_pb2.ChatMessage]:
    return [common_pb2.ChatMessage(role=role, content=content) for role, content in turns]


def called(arguments: str) -> common_pb2.ChatMessage:
    call = json.dumps({"function": {"name": "f", "arguments": arguments}})
    return common_pb2.ChatMessage(role="assistant", tool_calls_json=[call])


def as_dicts(messages: list[common_pb2.ChatMessage]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def refusal(tokenizer: Tokenizer, messages: list[common_pb2.ChatMessage], **more: Any) -> tuple[str, str]:
    with pytest.raises(KvorumError) as caught:
        tokenizer.encode_chat(messages, **more)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    (violation,) = caught.value.violations
    return violation.field, violation.description


fragments = st.sampled_from(
    ["<|im_end|>", "<|im_start|>system\n", "<s>", "CONTINUE_FINAL_MESSAGE_TAG", "  ", "\n\n", "é", "👩‍👧"]
)
texts = st.lists(st.text(max_size=12) | fragments, max_size=8).map("".join)
chats = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=5
)


@given(text=texts, add=st.booleans())
def test_text_gives_the_tokens_that_transformers_gives(reference: Any, text: str, add: bool) -> None:
    ids = from_reference(reference).encode(text, add)
    assert ids.tolist() == reference.encode(text, add_special_tokens=add)


def test_text_beyond_the_files_own_truncation_is_not_cut(reference: Any) -> None:
    assert len(from_reference(reference).encode("one two three " * 50)) > 100


def test_a_tokenizer_that_cannot_be_cached_says_why_and_works(
    reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spec = json.loads(reference.backend_tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["lstrip"] = True
    bundle = admin_pb2.TokenizerBundle(tokenizer_json=json.dumps(spec).encode(), digest="0123456789abcdef")
    caplog.set_level("INFO")
    tokenizer = Tokenizer.from_bundle(bundle)
    assert "tokenizer 0123456789ab: every text is tokenised from its start: it has no added" in caplog.text
    text = "one  <|im_start|> two"
    backend = Backend.from_str(json.dumps(spec))
    backend.no_truncation()
    backend.no_padding()
    assert tokenizer.encode(text).tolist() == backend.encode(text).ids


def test_other_threads_run_while_a_long_text_is_encoded(reference: Any) -> None:
    tokenizer, turns, done = from_reference(reference), [0], threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        before = turns[0]
        tokenizer.encode("The quick brown fox 123 jumps. " * 20_000)
        during = turns[0] - before
    finally:
        done.set()
        other.join()
    assert during > 5  # none or one when the GIL is held throughout


def test_the_bound_on_characters_per_token_holds(reference: Any) -> None:
    tokenizer = from_reference(reference)
    for token in ("<|im_start|>", "tokenizer", "    "):
        assert len(token) <= tokenizer.max_chars_per_token * len(tokenizer.encode(token, False))


@given(chat=chats, prompt=st.booleans())
def test_chats_render_and_tokenise_as_in_transformers(
    reference: Any, chat: list[tuple[str, str]], prompt: bool
) -> None:
    messages = said(*chat)
    ids, text = from_reference(reference).encode_chat(messages, add_generation_prompt=prompt)
    expected = {"chat_template": CHATML, "add_generation_prompt": prompt}
    assert text == reference.apply_chat_template(as_dicts(messages), tokenize=False, **expected)
    assert ids.tolist() == reference.apply_chat_template(as_dicts(messages), return_dict=False, **expected)


@given(chat=chats)
@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_a_continued_final_message_is_cut_where_transformers_cuts_it(
    reference: Any, chat: list[tuple[str, str]], template: str
) -> None:
    tokenizer, messages = from_reference(reference, template), said(*chat)
    expected = reference.apply_chat_template(
        as_dicts(messages), chat_template=template, tokenize=False, continue_final_message=True
    )
    rendered = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected


def test_tools_calls_and_template_arguments_render_as_in_transformers(reference: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "züg", "parameters": {"b": 1, "a": [1.5, None, "<&>"]}}}
    ]
    call: dict[str, Any] = {
        "type": "function",
        "id": "1",
        "function": {"name": "f", "arguments": '{"z": 1, "a": "<ü>"}'},
    }
    messages = [
        common_pb2.ChatMessage(role="user", content="hi", name="Ann"),
        common_pb2.ChatMessage(role="assistant", tool_calls_json=[json.dumps(call)]),
        common_pb2.ChatMessage(role="tool", content="4", tool_call_id="1"),
    ]
    parsed = {**call, "function": {"name": "f", "arguments": {"z": 1, "a": "<ü>"}}}
    expected = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    rendered = from_reference(reference, TOOLS).render_chat(
        messages, tools=tools, template_kwargs={"thinking": True, "unused": 1}
    )
    reference_text = reference.apply_chat_template(
        expected, tools=tools, chat_template=TOOLS, tokenize=False, thinking=True, add_generation_prompt=True
    )
    assert rendered == reference_text
    assert '"name": "züg", "parameters": {"b": 1, "a": [1.5, null, "<&>"]}' in rendered


def test_template_arguments_may_replace_special_tokens_as_in_transformers(reference: Any) -> None:
    text = from_reference(reference).render_chat(
        said(("user", "hi")), template_kwargs={"bos_token": "<start>"}
    )
    assert text.startswith("<start><|im_start|>user")


def test_templates_that_iterate_over_content_get_parts(reference: Any) -> None:
    tokenizer = from_reference(reference, PARTS, "openai")
    assert tokenizer.render_chat(said(("user", "a"), ("user", ""))) == "[user|text|a][user|text|]"


def test_unparsable_tool_arguments_become_an_empty_object_as_in_vllm(reference: Any) -> None:
    assert "f{}" in from_reference(reference, TOOLS).render_chat([called("{broken")])


def test_developer_becomes_one_system_message_in_front_when_the_template_lacks_the_role(
    reference: Any,
) -> None:
    tokenizer = from_reference(reference)
    chat = said(("system", "one"), ("user", "hi"), ("developer", "two"))
    merged = said(("system", "one\n\ntwo"), ("user", "hi"))
    assert tokenizer.render_chat(chat) == tokenizer.render_chat(merged)


def test_what_a_template_refuses_is_the_callers_mistake_in_its_own_words(reference: Any) -> None:
    field, words = refusal(from_reference(reference, PICKY), said(("system", "x")))
    assert field == "chat.messages"
    assert "start with the user, <please>" in words


def test_a_template_that_fails_is_a_refusal_too(reference: Any) -> None:
    field, words = refusal(from_reference(reference, "{{ messages[0].content + 1 }}"), said(("user", "x")))
    assert field == "chat.messages"
    assert "refused" in words


def test_a_template_cannot_reach_the_interpreter(reference: Any) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    assert "unsafe" in refusal(from_reference(reference, escape), said(("user", "x")))[1]


def test_a_model_without_template_says_so(reference: Any) -> None:
    field, words = refusal(from_reference(reference, ""), said(("user", "x")))
    assert field == "chat.messages"
    assert "no chat template" in words


def test_bad_chats_are_refused_by_field(reference: Any) -> None:
    tokenizer, hello = from_reference(reference), said(("user", "hi"))
    assert refusal(tokenizer, [])[0] == "chat.messages"
    assert refusal(tokenizer, said(("user", "a"), ("asistant", "b")))[0] == "chat.messages[1].role"
    assert refusal(tokenizer, said(("", "b")))[0] == "chat.messages[0].role"
    assert refusal(tokenizer, hello, template_kwargs={"tokenize": True})[0] == "chat.template_kwargs_json"
    assert refusal(tokenizer, hello, continue_final_message=True)[0] == "chat.continue_final_message"


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        ('{"type": "custom"}', "tool_calls_json[1]", "type 'function'"),
        ("[]", "tool_calls_json[1]", "must be a JSON object, got list"),
        ("{", "tool_calls_json[1]", "is not JSON"),
        ("", "tool_calls_json[1]", "is not JSON"),
        ('{"a":' * 100_000, "tool_calls_json[1]", "nests deeper than 64"),
        (
            json.dumps({"function": {"arguments": "[" * 65 + "]" * 65}}),
            "tool_calls_json[1].function.arguments",
            "nests deeper than 64",
        ),
        (
            json.dumps({"function": {"arguments": json.dumps({"a": "\ud800"})}}),
            "tool_calls_json[1].function.arguments",
            "surrogate",
        ),
    ],
)
def test_a_bad_tool_call_is_refused_by_field_whatever_the_role(
    reference: Any, call: str, field: str, words: str
) -> None:
    tokenizer, user = from_reference(reference), common_pb2.ChatMessage(role="user", content="hi")
    bad = called("{}")
    bad.tool_calls_json.append(call)
    path, description = refusal(tokenizer, [user, bad])
    assert path == f"chat.messages[1].{field}"
    assert words in description
    if words == "is not JSON":
        bad.role = "user"
        assert refusal(tokenizer, [user, bad])[0] == path


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "assistant|[]"), ("", "assistant|[text:]"), ("a", "assistant|[text:a]")]
)
def test_null_content_is_no_part_and_empty_content_is_one(
    reference: Any, content: str | None, expected: str
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}|"
        "[{% for p in m.content %}{{ p.type }}:{{ p.text }}{% endfor %}]{% endfor %}"
    )
    chat = chat_prompt([{"role": "assistant", "content": content}])
    assert from_reference(reference, template, "openai").render_chat(chat.messages) == expected


def test_only_an_assistant_has_reasoning(reference: Any) -> None:
    template = "{% for m in messages %}[{{ m.reasoning }}|{{ m.reasoning_content }}]{% endfor %}"
    chat = chat_prompt([{"role": role, "content": "", "reasoning": "hm"} for role in ("user", "assistant")])
    assert from_reference(reference, template).render_chat(chat.messages) == "[|][hm|hm]"


def test_a_role_that_the_template_names_is_known(reference: Any) -> None:
    template = "{% if messages[0].role == 'critic' %}critical{% endif %}"
    assert from_reference(reference, template).render_chat(said(("critic", "x"))) == "critical"


@pytest.mark.parametrize(
    ("tokenizer_json", "template"),
    [(b"{}", CHATML), (b"\xff", CHATML), (None, "{% for %}"), (None, "{{ x | nope }}")],
)
def test_an_unreadable_bundle_is_an_error_at_load(
    reference: Any, tokenizer_json: bytes | None, template: str
) -> None:
    whole = reference.backend_tokenizer.to_str().encode()
    bundle = admin_pb2.TokenizerBundle(tokenizer_json=tokenizer_json or whole, chat_template=template)
    with pytest.raises(ValueError, match=r"unreadable|does not compile"):
        Tokenizer.from_bundle(bundle)


def test_the_router_tokenizer_needs_no_model_library() -> None:
    program = (
        "import sys, router.tokenizer; "
        "print([name for name in ('torch', 'transformers', 'vllm', 'ray') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
