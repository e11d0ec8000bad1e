"""One streamed answer as its receiver sees it: the text, who served it, and the client's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from protos import common_pb2


@dataclass
class Reply:
    """Fed with the messages of one stream. Times are seconds from the moment it was made."""

    clock: Callable[[], float] = time.monotonic
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    served: common_pb2.Served = field(default_factory=common_pb2.Served)
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    engine: common_pb2.EngineTimes = field(default_factory=common_pb2.EngineTimes)
    ttft_s: float | None = None
    total_s: float = 0.0
    _tokens_after_first: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def add(self, message: common_pb2.GenerateResponse) -> Iterable[tuple[int, str]]:
        """Take one message in; returns what it adds to the text, as (index, text)."""
        self.total_s = self.clock() - self._started
        if message.HasField("served"):
            self.served = message.served
        if message.HasField("usage"):
            self.usage = message.usage
        if message.HasField("times"):
            self.engine = message.times
        tokens = sum(len(choice.token_ids) for choice in message.choices)
        if self.ttft_s is not None:
            self._tokens_after_first += tokens
        elif tokens:
            self.ttft_s = self.total_s
        added = [(choice.index, choice.text) for choice in message.choices if choice.text]
        for index, text in added:
            self.texts[index] = self.texts.get(index, "") + text
        for choice in message.choices:
            if choice.finish_reason:
                self.finish[choice.index] = common_pb2.FinishReason.Name(choice.finish_reason).lower()
        return added

    @property
    def text(self) -> str:
        """The first sequence."""
        return self.texts.get(0, "")

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first message that had any, over the time since."""
        if self.ttft_s is None or not self._tokens_after_first or self.total_s <= self.ttft_s:
            return None
        return self._tokens_after_first / (self.total_s - self.ttft_s)

    def line(self) -> str:
        """All of it on one line."""
        ttft = f"TTFT {self.ttft_s:.2f} s" if self.ttft_s is not None else "no token"
        speed = f"{self.tokens_per_s:.1f} tok/s" if self.tokens_per_s else ""
        parts = [
            self.served.replica,
            f"{self.usage.prompt_tokens} prompt tokens ({self.usage.cached_tokens} cached)",
            f"{self.usage.completion_tokens} generated",
            ttft,
            speed,
            f"trace {self.served.trace_id}" if self.served.trace_id else "",
        ]
        return " · ".join(filter(None, parts))

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "choices": [
                {"index": index, "text": self.texts.get(index, ""), "finish_reason": self.finish[index]}
                for index in sorted(self.finish)
            ],
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            "request_id": self.served.request_id,
            "model": self.served.model,
            "replica": self.served.replica,
            "epoch": self.served.epoch,
            "attempt": self.served.attempt,
            "trace_id": self.served.trace_id,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "engine_s": {
                "queue": self.engine.queue,
                "prefill": self.engine.prefill,
                "decode": self.engine.decode,
            },
        }
