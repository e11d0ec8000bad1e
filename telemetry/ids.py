"""Ids of traces and spans."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace.id_generator import IdGenerator


class GivenIds(IdGenerator):
    """Ids from the operating system, but for spans whose ids are known before they are made.

    The SDK's generator uses Python's global one, which engines seed and forks copy: two replicas
    would then give their spans the same ids.
    """

    _bits = random.SystemRandom().getrandbits

    def __init__(self) -> None:
        self._given = threading.local()

    @contextmanager
    def given(self, trace_id: int, span_id: int) -> Iterator[None]:
        """Spans that this thread starts within the block get these ids; neither may be 0."""
        self._given.ids = trace_id, span_id
        try:
            yield
        finally:
            del self._given.ids

    def generate_span_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._given, "ids", None)
        return ids[1] if ids else self._bits(64) or 1

    def generate_trace_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._given, "ids", None)
        return ids[0] if ids else self._bits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True
