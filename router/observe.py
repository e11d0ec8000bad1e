"""What happens to a request, as hooks: tracing and metrics wrap the router from outside.

The forwarding code calls these and knows no telemetry library; the defaults do nothing. Hooks
must not raise and must not block. `finished` is called exactly once per scope, whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protos.errors import KvorumError

if TYPE_CHECKING:
    from router.decide import Decision
    from router.group import Placement

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request asks for; no prompt content."""

    request_id: str
    operation: str  # "text_completion" or "chat"
    tenant: str = ""
    model: str = ""  # as asked for; may be empty
    sequences: int = 1
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Outcome:
    """How a request or an attempt ended. Neither error nor cancelled: every sequence finished."""

    error: KvorumError | None = None
    cancelled: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None  # since the request (or the attempt) began


class AttemptScope(Protocol):
    """One attempt on one replica."""

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What to send to the replica, such as the trace context."""

    def first_token(self) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


class RequestScope(Protocol):
    """One request, from its arrival to the end of its stream. Times are epoch nanoseconds."""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or empty."""

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None: ...

    def placed(self, placement: Placement, started_ns: int) -> None: ...

    def unplaced(self, error: KvorumError, started_ns: int) -> None: ...

    def attempt(self, decision: Decision, number: int) -> AttemptScope: ...

    def finished(self, outcome: Outcome) -> None: ...


class Observer(Protocol):
    """Told of every request."""

    def request(self, facts: RequestFacts, metadata: Metadata) -> RequestScope: ...


class SilentAttempt:
    """Records nothing."""

    metadata: Sequence[tuple[str, str]] = ()

    def first_token(self) -> None:
        """Nothing."""

    def finished(self, outcome: Outcome) -> None:
        """Nothing."""


class SilentRequest:
    """Records nothing."""

    trace_id = ""

    def tokenized(self, model: str, prompt_tokens: int, started_ns: int) -> None:
        """Nothing."""

    def placed(self, placement: Placement, started_ns: int) -> None:
        """Nothing."""

    def unplaced(self, error: KvorumError, started_ns: int) -> None:
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
