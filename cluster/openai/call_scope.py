"""What is known of the HTTP request that is being served, for everything below the edge.

vLLM's server lies between the edge and the engine client and passes on none of this. A context variable
does: the tasks that vLLM makes for a request inherit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.context import Context

from cluster.openai.failures import HttpFailure
from protos import inference_pb2
from telemetry.messages import Answers


class Cancellable(Protocol):
    """Work for one request."""

    def cancel(self) -> None:
        """End it soon; does nothing when it is over."""


@dataclass(slots=True)
class Generated:
    """What engines did for one HTTP request, over all of its prompts.

    Attributes:
        model: empty until something was sent to a router.
        sequences: asked for so far.
        first_at: when the first token was here, seconds since the epoch; 0 before.
    """

    model: str = ""
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    first_at: float = 0.0


@dataclass(slots=True)
class CallScope:
    """One HTTP request. The engine client writes `failure`, `retry_after_s`, `running`, `generated` and
    `answers` for the edge.

    Attributes:
        request_id: printable ASCII, at most 128 characters; also what vLLM sees.
        service_class: an inference_pb2.ServiceClass.
        context: the trace context whose new spans belong below this request's span.
        trace_id: 32 hex digits, or empty.
        failure: why the engine's side refused or broke it.
        retry_after_s: when it makes sense to try again, seconds.
        running: streams from routers.
        answers: collects what is generated; None unless that is to be recorded.
        understood: vLLM has made a request for an engine of it; what fails before is the request's fault.
    """

    request_id: str
    tenant: str = ""
    session: str = ""
    service_class: inference_pb2.ServiceClass.ValueType = inference_pb2.INTERACTIVE
    context: Context = field(default_factory=Context)
    retry_after_s: float | None = None
    trace_id: str = ""
    failure: HttpFailure | None = None
    running: set[Cancellable] = field(default_factory=set)
    generated: Generated = field(default_factory=Generated)
    answers: Answers | None = None
    understood: bool = False

    def cancel(self) -> None:
        """End what still runs for a client that left.

        vLLM's server drops the iterators of a stream that it cannot send any more, and leaves it to the
        garbage collector to close them: until then an engine would generate for nobody.

        A streamed response with `background: true` ends with its client too, and cannot be taken up again;
        one that is not streamed has been answered by then ("queued") and goes on.
        """
        for stream in tuple(self.running):
            stream.cancel()


_current: ContextVar[CallScope | None] = ContextVar("kvorum_http_call", default=None)


def current() -> CallScope | None:
    """The HTTP request that this task serves; None outside of one."""
    return _current.get()


@contextmanager
def entered(scope: CallScope) -> Iterator[CallScope]:
    """Within the block, and in the tasks made there, `current()` is `scope`."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
