"""How answers of two HTTP servers are compared: how a stream was cut does not count, what it said does."""

from __future__ import annotations

from typing import Any

import pytest

# The comparison itself is tested here, since a blind one would let every end-to-end test pass.
from tests.e2e.http_answers import differences, whole


def _chunk(text: str | None = None, **choice: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **choice}]}


def test_a_stream_cut_otherwise_is_the_same_answer() -> None:
    one = [
        _chunk("Hel"),
        _chunk("lo"),
        _chunk(finish_reason="stop"),
        {"object": "chat.completion.chunk", "choices": []},
    ]
    other = [_chunk("Hello", finish_reason="stop")]
    assert differences(whole(one), whole(other)) == []
    assert whole(one)[0]["choices"][0]["delta"]["content"] == "Hello"


def test_choices_that_come_interleaved_are_put_together_by_index() -> None:
    def piece(index: int, text: str) -> dict[str, Any]:
        return {"choices": [{"index": index, "text": text, "token_ids": [index]}]}

    (answer,) = whole([piece(1, "b"), piece(0, "a"), piece(1, "B"), piece(0, "A")])
    assert answer["choices"] == [
        {"index": 0, "text": "aA", "token_ids": [0, 0]},
        {"index": 1, "text": "bB", "token_ids": [1, 1]},
    ]


def test_events_of_another_kind_are_kept_apart_and_in_order() -> None:
    events = [
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "c"}},
    ]
    assert [event.get("delta", {}).get("text") for event in whole(events)] == [None, "ab", "c"]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ({"text": "a"}, {"text": "b"}),
        ({"text": "a"}, {"text": "a", "finish_reason": "stop"}),
        ({"text": "a", "finish_reason": None}, {"text": "a"}),
        ({"n": [1]}, {"n": [1, 2]}),
        ({"n": [1, 3]}, {"n": [1, 2]}),
        ({"logprob": -1.0}, {"logprob": -1.01}),
        ({"logprob": None}, {"logprob": -1.0}),
        ({"flag": True}, {"flag": 1}),
        ({"tokens": 3}, {"tokens": 4}),
    ],
)
def test_whatever_else_differs_is_told_with_its_place(got: dict[str, Any], expected: dict[str, Any]) -> None:
    (line,) = differences(got, expected)
    assert line.startswith("answer.")


def test_made_up_fields_and_the_last_digits_of_a_logprob_may_differ() -> None:
    got = {"id": "a", "created": 1, "choices": [{"logprob": -1.00001, "tool_calls": [{"id": "x"}]}]}
    expected = {"id": "b", "created": 2, "choices": [{"logprob": -1.0, "tool_calls": [{"id": "y"}]}]}
    assert differences(got, expected) == []
