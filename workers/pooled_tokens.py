"""How many of a request's prompt tokens its engine loaded from the pool.

vLLM's scheduler tells the front end this with a request's first token (`PrefillStats`), but its RequestOutput
has no field for it: it is taken from what the output processor is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor


class PooledTokens:
    """Of the requests that are watched, by the id that they were sent with."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    @contextmanager
    def watching(self, request_id: str) -> Iterator[None]:
        """For as long as somebody may ask about this request."""
        self._tokens[request_id] = 0
        try:
            yield
        finally:
            self._tokens.pop(request_id, None)

    def of(self, request_id: str) -> int:
        """0 as long as its prefill is not over."""
        return self._tokens.get(request_id, 0)

    def listen(self, processor: OutputProcessor) -> None:
        """Take note of all that this processor is given, from here on; in the order of its outputs."""
        process = processor.process_outputs

        def noting(outputs: list[EngineCoreOutput], *rest: Any, **more: Any) -> Any:
            for output in outputs:
                prefill = output.prefill_stats
                if prefill is not None and (tokens := prefill.num_external_cached_tokens):
                    self._note(processor, output.request_id, tokens)
            return process(outputs, *rest, **more)

        processor.process_outputs = noting

    def _note(self, processor: OutputProcessor, internal_id: str, tokens: int) -> None:
        state = processor.request_states.get(internal_id)
        if state is None:  # aborted
            return
        # One of several sequences has an id of its own; its parent knows the request's.
        sent = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
        if sent in self._tokens:
            self._tokens[sent] = max(self._tokens[sent], tokens)
