"""What one router knows, for `kvorum status`, metrics and tests: `kvorum.v1.RouterAdmin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protos import admin_pb2, admin_pb2_grpc
from router.admission import Count
from router.group import ReplicaGroup
from router.membership import Membership

NAME = "kvorum.v1.RouterAdmin"

_REFUSALS: tuple[Count, ...] = ("full", "late", "displaced", "expired")


class RouterAdminService(admin_pb2_grpc.RouterAdminServicer):
    """Reads the router's state; changes nothing."""

    def __init__(self, policy: str, members: Membership, in_flight: Callable[[], int]) -> None:
        self._policy, self._members, self._in_flight = policy, members, in_flight

    async def GetRouterState(  # noqa: N802
        self, request: admin_pb2.GetRouterStateRequest, context: Any
    ) -> admin_pb2.RouterState:
        return self.state()

    def state(self) -> admin_pb2.RouterState:
        """A copy of the present state."""
        return admin_pb2.RouterState(
            policy=self._policy,
            in_flight=self._in_flight(),
            leases=sum(load.requests for load in self._members.leased().values()),
            queues=[_queue(group) for group in self._members.groups()],
            replicas=[link.state() for link in self._members.all_links()],
        )


def _queue(group: ReplicaGroup) -> admin_pb2.QueueState:
    totals = group.turnstile.totals
    return admin_pb2.QueueState(
        model=group.model,
        length=len(group.turnstile),
        oldest_wait_s=group.turnstile.oldest_wait_s(),
        predicted_drain_s=group.drain_s(),
        refused=sum(totals[cause] for cause in _REFUSALS),
    )
