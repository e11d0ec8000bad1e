"""A router's messages become outputs of the kind that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cluster.openai.outputs import OutputAssembler
from protos import common_pb2

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
PROMPT = [4, 5, 6]


def assembler(**params: Any) -> OutputAssembler:
    return OutputAssembler("id", "the prompt", PROMPT, SamplingParams(**params), None)


def position(*entries: tuple[int, float, int, str]) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        tokens=[
            common_pb2.TokenLogprob(token_id=t, logprob=value, rank=rank, decoded=decoded)
            for t, value, rank, decoded in entries
        ]
    )


def message(*choices: common_pb2.ChoiceDelta, **more: Any) -> common_pb2.GenerateResponse:
    return common_pb2.GenerateResponse(choices=choices, **more)


def step(text: str, token: int, index: int = 0, **more: Any) -> common_pb2.ChoiceDelta:
    return common_pb2.ChoiceDelta(index=index, text=text, token_ids=[token], **more)


def texts(outputs: list[RequestOutput]) -> list[list[tuple[int, str, list[int]]]]:
    return [[(c.index, c.text, list(c.token_ids)) for c in output.outputs] for output in outputs]


STEPS = [
    message(step("a", 1)),
    message(step("b", 2)),
    message(step("", 3, finish_reason=common_pb2.LENGTH)),
]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DELTA, [[[(0, "a", [1])]], [[(0, "b", [2])]], [[(0, "", [3])]]]),
        (CUMULATIVE, [[[(0, "a", [1])]], [[(0, "ab", [1, 2])]], [[(0, "ab", [1, 2, 3])]]]),
        (FINAL_ONLY, [[], [], [[(0, "ab", [1, 2, 3])]]]),
    ],
)
def test_each_kind_says_as_much_as_it_should(kind: Any, expected: list[Any]) -> None:
    assembled = assembler(output_kind=kind)
    for number, (one, said) in enumerate(zip(STEPS, expected, strict=True), start=1):
        outputs = assembled.feed(one)
        assert texts(outputs) == said
        assert [output.finished for output in outputs] == [number == len(STEPS)] * len(outputs)
    (last,) = outputs
    assert last.outputs[0].finish_reason == "length"
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("id", "the prompt", PROMPT)


def test_several_sequences_end_one_by_one_and_the_request_with_the_last() -> None:
    assembled = assembler(n=2, output_kind=DELTA)
    first = assembled.feed(message(step("a", 1, 1), step("x", 2, 0)))
    second = assembled.feed(message(step("b", 3, 1, finish_reason=common_pb2.STOP)))
    third = assembled.feed(message(step("y", 4, 0, finish_reason=common_pb2.STOP)))
    assert texts(first) == [[(1, "a", [1]), (0, "x", [2])]]
    assert [outputs[0].finished for outputs in (first, second, third)] == [False, False, True]


def test_only_the_final_answer_holds_all_sequences_in_their_order() -> None:
    assembled = assembler(n=2, output_kind=FINAL_ONLY)
    assert assembled.feed(message(step("b", 3, 1, finish_reason=common_pb2.STOP))) == []
    (whole,) = assembled.feed(message(step("a", 2, 0, finish_reason=common_pb2.LENGTH)))
    assert texts([whole]) == [[(0, "a", [2]), (1, "b", [3])]]
    assert [c.finish_reason for c in whole.outputs] == ["length", "stop"]


@pytest.mark.parametrize(
    ("wire", "finish", "stop"),
    [
        ({"finish_reason": common_pb2.STOP}, "stop", None),
        ({"finish_reason": common_pb2.STOP, "stop_string": ""}, "stop", ""),
        ({"finish_reason": common_pb2.STOP, "stop_string": "x"}, "stop", "x"),
        ({"finish_reason": common_pb2.STOP, "stop_token_id": 0}, "stop", 0),
        ({"finish_reason": common_pb2.ABORT}, "abort", None),
        ({"finish_reason": common_pb2.ERROR}, "error", None),
        ({"finish_reason": common_pb2.REPETITION}, "repetition", None),
        ({}, None, None),
    ],
)
def test_why_it_ended(wire: dict[str, Any], finish: str | None, stop: Any) -> None:
    (output,) = assembler(output_kind=DELTA).feed(message(step("a", 1, **wire)))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (finish, stop)


def test_logprobs_come_with_their_tokens_and_add_up() -> None:
    assembled = assembler(output_kind=DELTA, logprobs=1)
    (first,) = assembled.feed(
        message(step("a", 1, logprobs=[position((1, -0.5, 2, "a"), (9, -0.25, 1, "z"))]))
    )
    (second,) = assembled.feed(message(step("b", 2, logprobs=[position((2, -1.5, 1, "b"))])))
    assert first.outputs[0].logprobs == [{1: Logprob(-0.5, 2, "a"), 9: Logprob(-0.25, 1, "z")}]
    assert list(first.outputs[0].logprobs[0]) == [1, 9]
    assert second.outputs[0].logprobs == [{2: Logprob(-1.5, 1, "b")}]
    assert (first.outputs[0].cumulative_logprob, second.outputs[0].cumulative_logprob) == (-0.5, -2.0)


def test_without_logprobs_there_are_none_rather_than_empty_ones() -> None:
    (output,) = assembler(output_kind=DELTA).feed(STEPS[0])
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_logprobs_of_chosen_tokens_need_no_number_of_logprobs() -> None:
    assembled = assembler(output_kind=DELTA, logprob_token_ids=[7])
    (output,) = assembled.feed(
        message(step("a", 1, logprobs=[position((1, -0.5, 1, "a"), (7, -3.0, 1, "q"))]))
    )
    assert list(output.outputs[0].logprobs[0]) == [1, 7]


def test_without_detokenising_logprobs_have_no_texts() -> None:
    assembled = assembler(output_kind=DELTA, logprobs=0, detokenize=False)
    (output,) = assembled.feed(message(step("", 1, logprobs=[position((1, -0.5, 1, ""))])))
    assert output.outputs[0].logprobs == [{1: Logprob(-0.5, 1, None)}]


def test_flat_logprobs_hold_the_same() -> None:
    params = {"output_kind": FINAL_ONLY, "logprobs": 1, "prompt_logprobs": 0, "flat_logprobs": True}
    assembled = assembler(**params)
    prompt = [position(), position((5, -2.0, 3, "p")), position((6, -4.0, 1, "q"))]
    one = step("a", 1, logprobs=[position((1, -0.5, 1, "a"))])
    two = step("b", 2, logprobs=[position((2, -1.0, 1, "b"))], finish_reason=common_pb2.STOP)
    assert assembled.feed(message(one, prompt_logprobs=prompt)) == []
    (output,) = assembled.feed(message(two))
    assert isinstance(output.outputs[0].logprobs, FlatLogprobs)
    assert list(output.outputs[0].logprobs) == [{1: Logprob(-0.5, 1, "a")}, {2: Logprob(-1.0, 1, "b")}]
    assert isinstance(output.prompt_logprobs, FlatLogprobs)
    assert list(output.prompt_logprobs) == [{}, {5: Logprob(-2.0, 3, "p")}, {6: Logprob(-4.0, 1, "q")}]


def test_the_prompts_logprobs_come_with_the_first_delta_of_each_sequence() -> None:
    assembled = assembler(n=2, output_kind=DELTA, prompt_logprobs=0)
    prompt = [position(), position((5, -2.0, 3, "p")), position((6, -4.0, 1, "q"))]
    expected = [None, {5: Logprob(-2.0, 3, "p")}, {6: Logprob(-4.0, 1, "q")}]
    seen = [
        assembled.feed(message(step("a", 1, 0), prompt_logprobs=prompt)),
        assembled.feed(message(step("b", 1, 0))),
        assembled.feed(message(step("x", 1, 1))),
        assembled.feed(message(step("y", 1, 1), step("c", 1, 0))),
    ]
    assert [outputs[0].prompt_logprobs for outputs in seen] == [expected, [], expected, []]


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
def test_a_growing_output_keeps_the_prompts_logprobs(kind: Any) -> None:
    assembled = assembler(output_kind=kind, prompt_logprobs=0)
    assembled.feed(message(step("a", 1), prompt_logprobs=[position(), position((5, -2.0, 3, "p"))]))
    (output,) = assembled.feed(message(step("b", 2, finish_reason=common_pb2.STOP)))
    assert output.prompt_logprobs == [None, {5: Logprob(-2.0, 3, "p")}]


def test_cached_tokens_are_those_of_the_latest_usage() -> None:
    assembled = assembler(output_kind=DELTA)
    usage = common_pb2.Usage(prompt_tokens=3, cached_tokens=2, cache_creation_tokens=1)
    (first,) = assembled.feed(message(step("a", 1), usage=usage))
    (second,) = assembled.feed(message(step("b", 2)))
    for output in (first, second):
        assert (output.num_cached_tokens, output.num_cache_creation_tokens) == (2, 1)


def test_the_engines_times_keep_their_differences() -> None:
    assembled = assembler(output_kind=DELTA)
    assembled.feed(message(step("a", 1), times=common_pb2.EngineTimes(queue=0.5, prefill=2.0)))
    last = step("b", 2, finish_reason=common_pb2.STOP)
    (output,) = assembled.feed(
        message(last, times=common_pb2.EngineTimes(queue=0.5, prefill=2.0, decode=4.0))
    )
    stats = output.metrics
    assert stats is not None
    assert stats.queued_ts > 0
    assert stats.scheduled_ts - stats.queued_ts == pytest.approx(0.5)
    assert stats.first_token_ts - stats.scheduled_ts == pytest.approx(2.0)
    assert stats.last_token_ts - stats.first_token_ts == pytest.approx(4.0)
    assert stats.num_generation_tokens == 2


def test_a_message_without_choices_completes_nothing() -> None:
    assert assembler().feed(common_pb2.GenerateResponse(usage=common_pb2.Usage(cached_tokens=1))) == []


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_a_message_after_the_end_repeats_nothing(kind: Any) -> None:
    assembled = assembler(output_kind=kind)
    (last,) = assembled.feed(message(step("a", 1, finish_reason=common_pb2.STOP)))
    assert last.finished
    assert assembled.feed(message(usage=common_pb2.Usage(cached_tokens=2))) == []
