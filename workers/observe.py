"""What tracing and metrics may see of a request at the replica; the default sees nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from protos import common_pb2, replica_pb2

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import RequestStateStats

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(slots=True)
class Sent:
    """What has become of a request so far; its stream keeps it up to date, so that observers need no call
    per token.

    Attributes:
        accepted: it was not refused, the engine has it.
        first_at: when the first message was made, by time.monotonic(); 0 before.
        pooled_tokens: of the cached ones, those that were loaded from the host's pool.
        times: the engine's own readings, which go on changing.
        fetch_at: when another host was asked for blocks, by time.monotonic(); 0: none was.
        fetch: what that brought; None until then, and for a request that ended before.
    """

    prompt_tokens: int
    accepted: bool = False
    cached_tokens: int = 0
    pooled_tokens: int = 0
    generated_tokens: int = 0
    finish_reasons: list[common_pb2.FinishReason.ValueType] = field(default_factory=list)
    first_at: float = 0.0
    times: RequestStateStats | None = None
    fetch_at: float = 0.0
    fetch: common_pb2.KvFetch | None = None


class GenerateScope(Protocol):
    """One request's life at this replica."""

    def finish(self, error: BaseException | None, sent: Sent) -> None:
        """The request is over; called exactly once, whatever happened."""


class GenerateObserver(Protocol):
    """Opens a scope for each request."""

    def start(self, request: replica_pb2.ReplicaGenerateRequest, metadata: Metadata) -> GenerateScope:
        """A request has arrived with this gRPC metadata."""
