"""Prompts and answers as attributes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.asgi import Message as Event
from cluster.openai.transcript import Overheard
from telemetry.messages import Answers, to_json


@given(st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text()), max_size=5), st.integers(2, 400))
def test_whatever_is_said_the_attribute_is_json_within_its_limit(
    messages: list[tuple[str, str]], limit: int
) -> None:
    text = to_json(messages, limit)
    assert len(text) <= limit
    for (role, said), kept in zip(messages, json.loads(text), strict=False):
        assert kept["role"] == role
        assert said.startswith(kept["parts"][0]["content"])


def test_a_long_prompt_is_cut_and_not_dropped() -> None:
    kept = json.loads(to_json([("user", '"quoted" ' * 1000)], 500))
    assert len(kept[0]["parts"][0]["content"]) > 300


def test_answers_are_kept_by_sequence_up_to_their_limit() -> None:
    answers = Answers(10)
    for index, text in ((1, "four"), (0, "one"), (1, ""), (0, "more"), (0, "lost")):
        answers.add(index, text)
    assert answers.messages() == [("assistant", "onemor"), ("assistant", "four")]


async def overheard(*bodies: bytes) -> list[tuple[str, str]]:
    parts = iter(bodies)

    async def receive() -> Event:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    heard = Overheard(receive)
    for body in bodies:
        assert (await heard.receive())["body"] == body
    return heard.messages()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
         [("system", "be"), ("user", "hi")]),
        ({"system": [{"type": "text", "text": "be"}], "messages": [{"role": "user", "content": "hi"}]},
         [("system", "be"), ("user", "hi")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
         [("user", "a")]),
        ({"prompt": "once"}, [("user", "once")]),
        ({"prompt": ["once", "twice"]}, [("user", "once"), ("user", "twice")]),
        ({"prompt": [1, 2, 3]}, []),
        ({"instructions": "be", "input": "hi"}, [("system", "be"), ("user", "hi")]),
        ({"messages": {"role": 1}, "prompt": None}, [("1", "")]),
        ([1], []),
    ],
)  # fmt: skip
async def test_what_a_body_asks(body: Any, expected: list[tuple[str, str]]) -> None:
    whole = json.dumps(body).encode()
    assert await overheard(whole[:5], whole[5:]) == expected


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 20) + b'{"prompt": "x"}']
)
async def test_what_cannot_be_read_says_nothing(body: bytes) -> None:
    assert await overheard(body) == []
