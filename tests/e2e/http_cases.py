"""Requests whose answers from our HTTP face and from bare vLLM's server must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.e2e.prompts import PROMPTS

FRONT_FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
)
"""Flags of vLLM's HTTP front end that both sides run with."""

MODEL = "smollm2"
LONG = PROMPTS[-1]

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request: how it is sent, by which client, and how often in a row.

    `send` gets the client, the arguments that isolate this run, and returns what the client's method does.
    """

    name: str
    client: str
    send: Callable[[Any, Json], Any]
    times: int = 1
    alone: bool = False
    """Nothing else may run beside it: in vLLM 0.32 a request for the log probabilities of chosen tokens
    spoils those of the others in its batch."""
    seeded: bool = False
    """On CPU bare vLLM 0.32 ends when the prompt of a seeded request is cut by others in its batch."""

    def isolation(self, run: str) -> Json:
        """A cache salt and a session of its own: cached-token counts do not depend on what ran before."""
        salt = f"{run}-{self.name}".replace(" ", "-")
        return {
            "extra_headers": {"X-Session-Id": salt},
            "extra_body": {"cache_salt": salt},
        }


def _merged(isolation: Json, extra: Json) -> Json:
    return isolation | {"extra_body": isolation["extra_body"] | extra}


def _chat(
    name: str, user: str = "What is gravity?", *, times: int = 1, extra: Json | None = None, **given: Any
) -> Case:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": user}],
        "temperature": 0,
        "max_tokens": 12,
    }
    return Case(
        f"chat {name}",
        "openai",
        lambda c, isolation: c.chat.completions.create(**(body | given), **_merged(isolation, extra or {})),
        times,
        alone="logprob_token_ids" in (extra or {}),
        seeded="seed" in given,
    )


def _completion(
    name: str,
    prompt: Any = "The capital of France is",
    *,
    times: int = 1,
    extra: Json | None = None,
    **given: Any,
) -> Case:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12}
    return Case(
        f"completion {name}",
        "openai",
        lambda c, isolation: c.completions.create(**(body | given), **_merged(isolation, extra or {})),
        times,
        seeded="seed" in given,
    )


def _response(name: str, **given: Any) -> Case:
    body = {"model": MODEL, "input": "What is gravity?", "temperature": 0, "max_output_tokens": 16}
    return Case(
        f"responses {name}", "openai", lambda c, isolation: c.responses.create(**(body | given), **isolation)
    )


def _message(name: str, **given: Any) -> Case:
    messages = [{"role": "user", "content": "What is gravity?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12}
    return Case(
        f"messages {name}",
        "anthropic",
        lambda c, isolation: c.messages.create(**(body | given), **_merged(isolation, {"temperature": 0})),
    )


def _raw(name: str, path: str, **body: Any) -> Case:
    return Case(name, "http", lambda c, _isolation: c.post(path, json=body), alone="label_token_ids" in body)


CITY: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}
CITY_FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TOOL_ASKED = "What is the weather in Paris, in C? Call get_weather once."
NAMED_TOOL: Json = {"type": "function", "function": {"name": "get_weather"}}
STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED: Json = {"temperature": 0.9, "seed": 7}


def _chats() -> Iterator[Case]:
    yield _chat("greedy")
    yield _chat("greedy, streamed", **STREAMED)
    yield _chat("greedy, streamed, usage with every piece",
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})  # fmt: skip
    yield _chat("n=2 with a seed", n=2, **SAMPLED)
    yield _chat("n=2 with a seed, streamed", n=2, **SAMPLED, **STREAMED)
    yield _chat("to the model's own end", "Say hi.", max_tokens=60)
    yield _chat("stop string", "Count from 1 to 9.", stop=["5"], max_tokens=40)
    yield _chat("stop string, streamed", "Count from 1 to 9.", stop=["5", "zzz"], max_tokens=40, **STREAMED)
    yield _chat("stop string kept in the text", "Count from 1 to 9.", stop=["5"], max_tokens=40,
        extra={"include_stop_str_in_output": True})  # fmt: skip
    yield _chat("logprobs", logprobs=True, top_logprobs=3)
    yield _chat("logprobs, streamed", logprobs=True, top_logprobs=3, **STREAMED)
    yield _chat("logprobs of the sampled tokens alone", logprobs=True)
    yield _chat("logprobs of chosen tokens", logprobs=True, extra={"logprob_token_ids": [28, 339, 1000]})
    yield _chat("prompt logprobs and token ids", extra={"prompt_logprobs": 2, "return_token_ids": True})
    yield _chat("token ids, streamed", extra={"return_token_ids": True}, **STREAMED)
    yield _chat("seed", **SAMPLED)
    yield _chat("seed, streamed", **SAMPLED, **STREAMED)
    yield _chat("JSON schema", "Name a capital.", response_format=CITY_FORMAT, max_tokens=40)
    yield _chat(
        "JSON schema, streamed", "Name a capital.", response_format=CITY_FORMAT, max_tokens=40, **STREAMED
    )
    yield _chat(
        "JSON object", "Name a capital as JSON.", response_format={"type": "json_object"}, max_tokens=24
    )
    yield _chat("regex", "A phone number.", extra={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}})
    yield _chat("choice", "Is water wet?", extra={"structured_outputs": {"choice": ["yes", "no"]}})
    yield _chat(
        "grammar", "Is water wet?", extra={"structured_outputs": {"grammar": 'root ::= "wet" | "dry"'}}
    )
    for how in ("required", NAMED_TOOL, "auto", "none"):
        name = how if isinstance(how, str) else "named"
        asked: Json = {
            "tools": [WEATHER],
            "tool_choice": how,
            "max_tokens": 24 if how in ("auto", "none") else 64,
        }
        yield _chat(f"tool choice {name}", TOOL_ASKED, **asked)
        yield _chat(f"tool choice {name}, streamed", TOOL_ASKED, **asked, **STREAMED)
    yield _chat("cached tokens", LONG, times=2)
    yield _chat("cached tokens, streamed", LONG, times=2, **STREAMED)
    yield _chat("conversation with a system message", messages=[
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Capital of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": [{"type": "text", "text": "And of France?"}]},
    ])  # fmt: skip
    yield _chat("continued final message", messages=[
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ], extra={"add_generation_prompt": False, "continue_final_message": True, "echo": True})  # fmt: skip


def _completions() -> Iterator[Case]:
    yield _completion("greedy")
    yield _completion("greedy, streamed", **STREAMED)
    yield _completion("of several prompts", PROMPTS[:3])
    yield _completion("of several prompts, streamed", PROMPTS[:3], **STREAMED)
    yield _completion("of token ids", [504, 3575, 282, 4649, 314])
    yield _completion("n=2 with a seed", n=2, **SAMPLED)
    yield _completion("n=2 with a seed, streamed", n=2, **SAMPLED, **STREAMED)
    yield _completion("echo with logprobs", echo=True, logprobs=2)
    yield _completion("echo with logprobs and no new token", echo=True, logprobs=2, max_tokens=0)
    yield _completion("echo, streamed", echo=True, logprobs=2, **STREAMED)
    yield _completion("logprobs, streamed", logprobs=2, **STREAMED)
    yield _completion("tokens as ids", logprobs=2, extra={"return_tokens_as_token_ids": True})
    yield _completion("prompt logprobs", extra={"prompt_logprobs": 1})
    yield _completion("stop token", extra={"stop_token_ids": [30, 260, 284]}, max_tokens=30)
    yield _completion("stop string over tokens", "1, 1, 2, 3, 5, 8,", stop=["21, 3"], max_tokens=30)
    yield _completion(
        "past the model's end", "Hi<|im_end|>", extra={"ignore_eos": True, "skip_special_tokens": False}
    )
    yield _completion("at least so many tokens", "Bye.<|im_end|>", extra={"min_tokens": 6})
    yield _completion(
        "penalties", presence_penalty=1.0, frequency_penalty=0.5, extra={"repetition_penalty": 1.3}
    )
    yield _completion("logit bias", logit_bias={"4649": 4.0, "314": -100})
    yield _completion("bad words and allowed tokens",
        extra={"bad_words": [" Paris"], "allowed_token_ids": list(range(200, 9000))})  # fmt: skip
    yield _completion("top-p, top-k and min-p", top_p=0.9, extra={"top_k": 20, "min_p": 0.02}, **SAMPLED)
    yield _completion("truncated prompt", LONG, extra={"truncate_prompt_tokens": 32})
    yield _completion("beam search", n=2, extra={"use_beam_search": True}, max_tokens=6)
    yield _completion("text past ASCII", "Zażółć gęślą jaźń 🦊 日本", max_tokens=16)
    yield _completion("text past ASCII, streamed", "Zażółć gęślą jaźń 🦊 日本", max_tokens=16, **STREAMED)
    yield _completion("cached tokens", LONG, times=2)


def _others() -> Iterator[Case]:
    yield _response("greedy")
    yield _response("streamed", stream=True)
    yield _response("instructions and history", instructions="Answer in one word.", input=[
        {"role": "user", "content": "Capital of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "And of France?"},
    ])  # fmt: skip
    yield _response("JSON schema", input="Name a capital.", max_output_tokens=40,
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY}})  # fmt: skip
    yield _response("logprobs", include=["message.output_text.logprobs"], top_logprobs=2)
    yield _response("tool", input=TOOL_ASKED, max_output_tokens=64, tool_choice="required",
        tools=[{"type": "function", **WEATHER["function"]}])  # fmt: skip
    yield _message("greedy")
    yield _message("streamed", stream=True)
    yield _message("system and stop sequence", system="Count.", stop_sequences=["5"], max_tokens=40,
        messages=[{"role": "user", "content": "Count from 1 to 9."}])  # fmt: skip
    function = WEATHER["function"]
    tool = {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "input_schema": function["parameters"],
    }
    asked: Json = {"messages": [{"role": "user", "content": TOOL_ASKED}], "tools": [tool], "max_tokens": 64}
    yield _message("tool", tool_choice={"type": "any"}, **asked)
    yield _message("tool, streamed", tool_choice={"type": "any"}, stream=True, **asked)
    yield Case("messages count tokens", "anthropic", lambda c, _isolation: c.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "What is gravity?"}]))  # fmt: skip
    yield Case("models", "openai", lambda c, _isolation: c.models.list())
    yield _raw("tokenize text", "/tokenize", model=MODEL, prompt="The capital", return_token_strs=True)
    yield _raw("tokenize chat", "/tokenize", model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    yield _raw("detokenize", "/detokenize", model=MODEL, tokens=[504, 3575])
    yield _raw("chat batch", "/v1/chat/completions/batch", model=MODEL, temperature=0, max_tokens=8,
        messages=[[{"role": "user", "content": text}] for text in ("Hi", "What is gravity?")])  # fmt: skip
    yield _raw("generative scoring", "/generative_scoring", model=MODEL, query="Is it wet?",
        items=[" Water.", " Sand."], label_token_ids=[5158, 787])  # fmt: skip
    yield Case("version", "http", lambda c, _isolation: c.get("/version"))


def _refused() -> Iterator[Case]:
    yield _chat("of an unknown model", model="gpt-9")
    yield _completion("of an unknown model", model="gpt-9")
    yield _completion("with a negative temperature", temperature=-1)
    yield _completion("with top_p zero", top_p=0)
    yield _completion("longer than the context", [7] * 5000)
    yield _completion("with max_tokens over the context", max_tokens=5000)
    yield _completion("with too many logprobs", logprobs=1000)
    yield _completion("with a token out of vocabulary", [5, 49152])
    yield _completion("with an empty prompt", [])
    yield _completion("with a broken regex", extra={"structured_outputs": {"regex": "(unclosed"}})
    yield _chat("with a broken schema", response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}})  # fmt: skip
    yield _chat("with a tool choice and no tool", tool_choice="required")
    yield _chat("without messages", messages=[])
    yield _response("of an unknown model", model="gpt-9")
    yield _message("of an unknown model", model="gpt-9")
    yield _raw("detokenize out of vocabulary", "/detokenize", model=MODEL, tokens=[-1])


def streamed(case: Case) -> Case:
    """The same request, its answer asked for as a stream."""
    return replace(case, send=lambda c, isolation: case.send(c, isolation | {"stream": True}))


CASES = [*_chats(), *_completions(), *_others()]
REFUSED = [*_refused()]
assert len({case.name for case in CASES + REFUSED}) == len(CASES + REFUSED)
