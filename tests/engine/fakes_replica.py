"""What stands around a replica's servicer in tests that have no gRPC call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FakeObserver:
    """Sees nothing; its scopes neither."""

    def start(self, request: Any, metadata: Any) -> FakeObserver:
        return self

    def finish(self, error: BaseException | None, sent: Any) -> None:
        return


class FakeContext:
    """A call that carries nothing; a refusal is raised where gRPC would send it."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]] | None:
        return None

    async def abort_with_status(self, status: Any) -> None:
        raise AssertionError(status.details)
