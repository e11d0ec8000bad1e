"""Items and invariants for the tests of the admission queue."""

from __future__ import annotations

from router.admission import AdmissionQueue, Item, ServiceClass


def item(
    tenant: str = "t",
    tokens: int = 100,
    *,
    priority: int = 0,
    kind: ServiceClass = ServiceClass.INTERACTIVE,
    at: float = 0.0,
    deadline: float = 1e6,
    name: str = "",
) -> Item:
    return Item(tenant, tokens, at, deadline, kind, priority, payload=name)


def assert_nothing_left(queue: AdmissionQueue) -> None:
    """No item, and no memory that follows items."""
    assert len(queue) == queue.queued_tokens == 0
    assert queue.peek() is None
    assert queue.next_expiry() is None
    assert queue.oldest_wait_s(1e9) == 0.0
    assert not queue._expiries
    assert not queue._aside
    assert queue._owed_to_batch == 0
    for lanes in (queue._interactive, queue._batch):
        assert lanes.count == lanes.tokens == lanes.tenants == lanes._most == 0
        assert not lanes._turns
        assert not lanes._by_count
