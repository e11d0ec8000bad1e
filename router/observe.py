"""What happens to a request, as hooks: tracing and metrics wrap the router from outside.

The forwarding code calls these and knows no telemetry library; the defaults do nothing. Hooks
must not raise and must not block. `finished` is called exactly once per scope, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError, is_refusal

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement

Metadata = Sequence[tuple[str, str | bytes]]
Reader = Callable[[common_pb2.GenerateResponse], None]


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request asks for."""

    request_id: str
    operation: str  # "text_completion" or "chat"
    tenant: str = ""
    model: str = ""  # as asked for; may be empty
    sequences: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    # Holds the prompt: only for those whose owner has asked for prompts to be recorded.
    message: inference_pb2.GenerateRequest | inference_pb2.ChatRequest | None = None


@dataclass(slots=True)
class Outcome:
    """How a request or an attempt ended. Neither error nor cancelled: every sequence finished.

    Times are seconds since the first (or only) attempt's call of its replica.
    """

    error: KvorumError | None = None
    cancelled: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pooled_tokens: int = 0  # of them, from the memory of the replica's host
    generated_tokens: int = 0
    first_token_s: float | None = None
    fetch: common_pb2.KvFetch | None = None  # when another host was asked for blocks

    @property
    def pull_s(self) -> float:
        """Until the engine had it, blocks being under way."""
        return self.fetch.seconds if self.fetch is not None else 0.0

    @property
    def name(self) -> Literal["ok", "error", "cancelled", "refused"]:
        """`refused`: turned away as designed, for what it asked or how much there was; `error`: it failed."""
        if self.error is not None:
            return "refused" if is_refusal(self.error) else "error"
        return "cancelled" if self.cancelled else "ok"


class AttemptScope(Protocol):
    """One attempt on one replica."""

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What to send to the replica, such as the trace context."""

    @property
    def reader(self) -> Reader | None:
        """Who wants to see each message; None, but where answers are recorded."""

    def finished(self, outcome: Outcome) -> None: ...


class RequestScope(Protocol):
    """One request, from its arrival to the end of its stream. Times are epoch nanoseconds."""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or empty."""

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None: ...

    def placed(self, placement: Placement, started_ns: int) -> None: ...

    def unplaced(self, error: KvorumError | None, started_ns: int) -> None:
        """It found no place: refused, or (None) given up while it waited."""

    def attempt(self, decision: Decision, number: int) -> AttemptScope: ...

    def finished(self, outcome: Outcome) -> None: ...


class Observer(Protocol):
    """Told of every request."""

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope: ...


class SilentAttempt:
    """Records nothing."""

    metadata: Sequence[tuple[str, str]] = ()
    reader: Reader | None = None

    def finished(self, outcome: Outcome) -> None:
        """Nothing."""


class SilentRequest:
    """Records nothing."""

    trace_id = ""

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        """Nothing."""

    def placed(self, placement: Placement, started_ns: int) -> None:
        """Nothing."""

    def unplaced(self, error: KvorumError | None, started_ns: int) -> None:
        """Nothing."""

    def attempt(self, decision: Decision, number: int) -> AttemptScope:
        """Nothing to record."""
        return _SILENT_ATTEMPT

    def finished(self, outcome: Outcome) -> None:
        """Nothing."""


class SilentObserver:
    """Records nothing: the default, for tests and for measuring what observing costs."""

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope:
        """Nothing to record."""
        return _SILENT_REQUEST


_SILENT_ATTEMPT = SilentAttempt()
_SILENT_REQUEST = SilentRequest()
