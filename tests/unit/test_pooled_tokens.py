"""Tokens that were loaded from the pool are counted for the request that they were loaded for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workers.pooled_tokens import PooledTokens


class FakeProcessor:
    """vLLM's output processor: knows running requests by ids of its own."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.processed: list[tuple[Any, Any, Any]] = []

    def run(self, internal: str, sent: str, parent: str = "") -> None:
        ancestor = SimpleNamespace(external_req_id=parent) if parent else None
        self.request_states[internal] = SimpleNamespace(external_req_id=sent, parent_req=ancestor)

    def process_outputs(self, outputs: list[Any], timestamp: float, weight_version: str = "") -> str:
        self.processed.append((outputs, timestamp, weight_version))
        return "processed"


def output(internal: str, loaded: int | None) -> Any:
    stats = None if loaded is None else SimpleNamespace(num_external_cached_tokens=loaded)
    return SimpleNamespace(request_id=internal, prefill_stats=stats)


def listening(*requests: tuple[str, str, str]) -> tuple[Any, PooledTokens]:
    processor, tokens = FakeProcessor(), PooledTokens()
    for request in requests:
        processor.run(*request)
    tokens.listen(processor)  # type: ignore[arg-type]
    return processor, tokens


def test_each_request_has_its_own_and_the_processor_its_outputs() -> None:
    processor, tokens = listening(("a-1", "a", ""), ("b-1", "b", ""))
    outputs = [output("a-1", 64), output("b-1", None)]
    with tokens.watching("a"), tokens.watching("b"):
        assert processor.process_outputs(outputs, 1.5, weight_version="w") == "processed"
        assert processor.processed == [(outputs, 1.5, "w")]
        processor.process_outputs([output("a-1", None), output("b-1", 0)], 2.0)
        assert (tokens.of("a"), tokens.of("b")) == (64, 0)


def test_several_sequences_of_a_request_count_once() -> None:
    processor, tokens = listening(("0_a", "0_a", "a"), ("1_a", "1_a", "a"))
    with tokens.watching("a"):
        processor.process_outputs([output("0_a", 64), output("1_a", 32)], 1.0)
        assert tokens.of("a") == 64


def test_nothing_is_kept_of_a_request_that_is_over_or_that_nobody_asked_about() -> None:
    processor, tokens = listening(("a-1", "a", ""))
    with tokens.watching("a"):
        processor.process_outputs([output("a-1", 64), output("aborted", 64)], 1.0)
    processor.process_outputs([output("a-1", 64)], 2.0)
    assert tokens.of("a") == 0
    assert tokens._tokens == {}
