"""What a request is told that found no place: RESOURCE_EXHAUSTED, and when to come back."""

from __future__ import annotations

import grpc

from protos import common_pb2
from protos.errors import KvorumError
from router.lanes import Item

_UNKNOWN_S = 1.0
_LEAST_S = 0.1
_MOST_S = 60.0


def full(queued: int, drain_s: float | None) -> KvorumError:
    """The queue takes no more. `drain_s` is when it will be empty, None when unknown."""
    return _refusal(f"{queued} requests wait, the most this queue takes; come back later", drain_s)


def displaced(queued: int, drain_s: float | None) -> KvorumError:
    """It waited, and had to leave for a request with a better claim."""
    message = (
        f"the queue is full with {queued} requests, and this one's place went to one of a tenant or class "
        "that holds less of it; come back later"
    )
    return _refusal(message, drain_s)


def late(item: Item, now: float, queued: int, wait_s: float, ttft_s: float) -> KvorumError:
    """Its deadline would pass before its first token."""
    message = (
        f"the deadline leaves {max(0.0, item.deadline - now):.2f} s, but about {wait_s:.2f} s of queue "
        f"({queued} requests) and {ttft_s:.2f} s to the first token are ahead; "
        "come back later or allow more time"
    )
    return _refusal(message, wait_s)


def expired(item: Item, now: float, queued: int, drain_s: float | None) -> KvorumError:
    """There were replicas, but none had room in time."""
    message = (
        f"no replica had room within {now - item.arrived:.2f} s of the {item.deadline - item.arrived:.2f} s "
        f"that the deadline allows; {queued} requests still wait; come back later or allow more time"
    )
    return _refusal(message, drain_s)


def _refusal(message: str, retry_after_s: float | None) -> KvorumError:
    after_s = _UNKNOWN_S if retry_after_s is None else min(max(retry_after_s, _LEAST_S), _MOST_S)
    return KvorumError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, message, retry_after_s=after_s
    )
