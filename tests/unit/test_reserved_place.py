"""The placement group that a replica's supervisor keeps from one epoch to the next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_supervisor import surroundings

from cluster import supervisor as supervisors
from cluster.placement import PlacementError
from cluster.supervisor import ReplicaSupervisor


class FakeGroup:
    """Of Ray's placement groups: made, looked at and removed."""

    made: list[FakeGroup]

    def __init__(self, *_bundles: Any, **_options: Any) -> None:
        self.state, self.removed = "CREATED", False
        self.made.append(self)

    async def ready(self) -> None:
        assert not self.removed


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    FakeGroup.made = []
    monkeypatch.setattr(supervisors, "placement_group", FakeGroup)
    monkeypatch.setattr(supervisors, "_find_group", lambda _replica: None)
    monkeypatch.setattr(supervisors, "remove_placement_group", lambda group: setattr(group, "removed", True))
    monkeypatch.setattr(supervisors.ray.util, "placement_group_table", lambda group: {"state": group.state})
    return FakeGroup.made


async def test_a_replica_keeps_its_place_unless_a_node_of_it_is_gone(groups: list[FakeGroup]) -> None:
    replica = ReplicaSupervisor("replica-0", surroundings({}))
    first = await replica._reserve()
    assert await replica._reserve() is first
    groups[0].state = "RESCHEDULING"
    second = await replica._reserve()
    assert second is not first
    assert [group.removed for group in groups] == [True, False]
    assert await replica._reserve() is second


class UnbornActor:
    """Ray answers for an actor when it runs, and not before."""

    def __init__(self) -> None:
        self.runs = asyncio.Event()
        self.phase = self

    async def remote(self) -> None:
        await self.runs.wait()


async def test_an_actor_whose_node_went_is_not_waited_for(groups: list[FakeGroup]) -> None:
    actor, group = UnbornActor(), FakeGroup()
    waiting = asyncio.ensure_future(supervisors._born(actor, group))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    groups[0].state = "RESCHEDULING"
    with pytest.raises(PlacementError, match="node"):
        await waiting
    actor.runs.set()
    await supervisors._born(actor, group)
