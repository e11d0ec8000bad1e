"""The admission queue under any mix of operations."""

from __future__ import annotations

from helpers_admission import assert_nothing_left, item
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protos.errors import KvorumError
from router.admission import AdmissionQueue, Item, ServiceClass

BATCH = ServiceClass.BATCH


class AnyMix(RuleBasedStateMachine):
    """A queue of 12 under any mix of operations, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(12, batch_share=0.25)
        self.waiting: list[Item] = []
        self.now = 0.0
        self.offered = 0
        self.refused: KvorumError | None = None

    @rule(
        tenant=st.sampled_from("abcd"),
        tokens=st.integers(1, 1000),
        priority=st.integers(-1, 1),
        kind=st.sampled_from(ServiceClass),
        allowed=st.floats(0.5, 30),
    )
    def offer(self, tenant: str, tokens: int, priority: int, kind: ServiceClass, allowed: float) -> None:
        each = item(tenant, tokens, priority=priority, kind=kind, at=self.now, deadline=self.now + allowed)
        self.offered += 1
        try:
            displaced = self.queue.offer(each, self.now, predicted_tokens_per_s=500.0)
        except KvorumError as error:
            self.refused = error
            return
        if displaced is not None:
            assert len(self.waiting) == 12
            self.waiting.remove(displaced)
        self.waiting.append(each)

    @rule()
    def pop(self) -> None:
        head = self.queue.peek()
        each = self.queue.pop(self.now)
        assert each is head
        if each is None:
            assert not self.waiting
            return
        alike = [o for o in self.waiting if (o.tenant, o.service_class) == (each.tenant, each.service_class)]
        assert each is min(alike, key=lambda o: o.priority)  # the first to come of those
        self.waiting.remove(each)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(each, self.now)
        assert not self.queue.remove(each, self.now)
        self.waiting.remove(each)

    @rule(looks=st.integers(1, 14), cancel=st.booleans())
    def look_past_heads(self, looks: int, cancel: bool) -> None:
        head = self.queue.peek()
        for _ in range(looks):
            self.queue.set_aside()
        if cancel and head is not None:
            self.queue.remove(head, self.now)
            self.waiting.remove(head)
        self.queue.put_back()
        assert cancel or self.queue.peek() is head

    @rule(elapsed=st.floats(0, 3))
    def pass_time(self, elapsed: float) -> None:
        self.now += elapsed
        self.queue.observe(self.now, stalled=False)
        expired = self.queue.expire(self.now)
        assert set(expired) == {each for each in self.waiting if each.answer_by <= self.now}
        self.waiting = [each for each in self.waiting if each not in expired]

    @rule()
    def close(self) -> None:
        assert self.queue.clear(self.now) == self.waiting
        self.waiting = []
        assert_nothing_left(self.queue)

    @invariant()
    def refusals_say_when_to_come_back(self) -> None:
        if self.refused is not None:
            assert self.refused.retry_after_s is not None
            assert 0.1 <= self.refused.retry_after_s <= 60

    @invariant()
    def counts_agree(self) -> None:
        queue, waiting = self.queue, self.waiting
        assert len(queue) == len(waiting) <= 12
        assert queue.queued_tokens == sum(each.tokens for each in waiting)
        assert queue.lengths()[BATCH] == sum(each.service_class is BATCH for each in waiting)
        assert (queue.peek() is None) == (not waiting)
        assert sum(queue.totals.values()) + len(waiting) == self.offered
        assert len(queue._expiries) <= 2 * 12 + 17
        assert queue._interactive.tenants + queue._batch.tenants <= len(waiting)
        for lanes in (queue._interactive, queue._batch):
            assert len(lanes._turns) <= 2 * 12 + 17

    def teardown(self) -> None:
        while (each := self.queue.peek()) is not None:
            self.queue.remove(each, self.now)
        assert_nothing_left(self.queue)


AnyMix.TestCase.settings = settings(deadline=None, stateful_step_count=40)
TestAnyMix = AnyMix.TestCase
