"""A streamed answer, timed by the client's own clock."""

from __future__ import annotations

import pytest

from cluster.reply import Reply
from protos import common_pb2


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def message(*tokens: int, text: str = "", index: int = 0, finish: int = 0) -> common_pb2.GenerateResponse:
    response = common_pb2.GenerateResponse()
    response.choices.add(index=index, text=text, token_ids=tokens, finish_reason=finish)
    return response


def test_first_token_and_speed_are_measured_from_the_request() -> None:
    clock = FakeClock()
    reply = Reply(clock)
    for at, tokens in ((100.5, (1,)), (101.0, (2, 3)), (101.5, (4, 5))):
        clock.now = at
        reply.add(message(*tokens))
    assert reply.ttft_s == pytest.approx(0.5)
    assert reply.tokens_per_s == pytest.approx(4.0)


def test_message_without_tokens_is_not_the_first_token() -> None:
    reply = Reply(FakeClock())
    reply.add(common_pb2.GenerateResponse(served=common_pb2.Served(replica="replica-1")))
    assert reply.ttft_s is None
    assert reply.tokens_per_s is None
    assert "no token" in reply.line()


def test_one_token_has_no_speed() -> None:
    reply = Reply(FakeClock())
    reply.add(message(1, text="a", finish=common_pb2.STOP))
    assert reply.tokens_per_s is None
    assert reply.finish == {0: "stop"}


def test_sequences_are_kept_apart() -> None:
    reply = Reply(FakeClock())
    for index, text in ((0, "a"), (1, "x"), (0, "b")):
        assert list(reply.add(message(1, text=text, index=index))) == [(index, text)]
    assert reply.texts == {0: "ab", 1: "x"}
    assert reply.text == "ab"


def test_line_names_replica_cache_and_trace() -> None:
    reply = Reply(FakeClock())
    first = message(1, text="a")
    first.served.CopyFrom(common_pb2.Served(replica="replica-1", trace_id="ab" * 16))
    first.usage.CopyFrom(common_pb2.Usage(prompt_tokens=10, cached_tokens=8, completion_tokens=1))
    reply.add(first)
    assert reply.line().startswith("replica-1 · 10 prompt tokens (8 cached) · 1 generated · TTFT 0.00 s")
    assert reply.line().endswith("trace " + "ab" * 16)
