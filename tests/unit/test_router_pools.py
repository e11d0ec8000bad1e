"""Which ways there are to have a prompt's blocks, against the plainest way to say it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost import RowLoad
from router.pool import PRIOR_BYTES_PER_MS, Pools, Pull, Share, Supply

BLOCK_BYTES = 2_000_000  # a millisecond to load, by the prior
BLOCK = 16
NOW = 50.0
STEP_MS = 20.0


def share(arena: str, *, namespace: str = "n", agent: str | None = None) -> Share:
    return Share(arena, namespace, f"{arena}:1" if agent is None else agent, BLOCK_BYTES)


def load(count: int) -> RowLoad:
    none, step = np.zeros(count), np.full(count, STEP_MS)
    return RowLoad(none, none, none, none + 1, none + 1, none, step, none, none, none, none, none)


@dataclass
class Fleet:
    """Rows with depths, in blocks."""

    pools: Pools
    device: list[int]
    host: list[int]  # in the arena alone
    pending: list[int] | None = None
    trusted: list[bool] | None = None

    def supply(self, now: float = NOW, salt: int = 7) -> Supply:
        count = len(self.device)
        distrusted = np.array(
            [row for row, trusted in enumerate(self.trusted or []) if not trusted], np.int64
        )
        device, host = np.array(self.device), np.array(self.host)
        device[distrusted], host[distrusted] = 0, 0
        return self.pools.supply(
            np.arange(count),
            load(count),
            device=device,
            pending=np.array(self.pending or [0] * count),
            held=host,
            distrusted=distrusted,
            block_size=BLOCK,
            salt=salt,
            now=now,
        )

    def pull_ms(self, row: int, now: float = NOW) -> float:
        """Infinite: it is not to pull."""
        pull = self.supply(now).fetch.pull
        return math.inf if pull is None else float(pull[row])

    def agents(self, salt: int = 7) -> set[str]:
        """Who can be asked."""
        return {source.agent for source, _, _ in self.supply(salt=salt).offers}


def pools_of(*shares: Share | None) -> Pools:
    pools = Pools()
    for row, each in enumerate(shares):
        pools.share(row, each)
    return pools


def test_own_arena_is_loaded_whether_it_pays_or_not() -> None:
    supply = Fleet(pools_of(share("a"), share("a")), device=[2, 9], host=[8, 8]).supply()
    assert supply.cached.tolist() == [8 * BLOCK, 9 * BLOCK]
    assert supply.fetch.pull is None
    assert supply.fetch.load.tolist() == [6 * 1.0 + STEP_MS, 0.0]


def test_what_a_prompt_in_flight_leaves_on_the_device_is_not_loaded() -> None:
    supply = Fleet(pools_of(share("a")), device=[2], host=[8], pending=[5]).supply()
    assert supply.fetch.load.tolist() == [3 * 1.0 + STEP_MS]


def test_measured_loads_replace_the_prior() -> None:
    pools = pools_of(share("a"))
    assert BLOCK_BYTES / PRIOR_BYTES_PER_MS == 1.0
    for said, per_block in ((3.0, 3.0), (0.0, 1.0), (math.nan, 1.0), (math.inf, 1.0)):
        pools.loads(0, said)
        supply = Fleet(pools, device=[0], host=[4]).supply()
        assert supply.fetch.load.tolist() == [4 * per_block + STEP_MS]


def test_another_host_can_be_asked_when_it_holds_more() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[3, 0], host=[5, 20])
    supply = fleet.supply()
    assert fleet.agents() == {"b:1"}
    assert supply.cached.tolist() == [[5 * BLOCK, 20 * BLOCK], [20 * BLOCK, 20 * BLOCK]]
    assert supply.fetch.pull == pytest.approx([5.0 + 15 * BLOCK_BYTES * 8e-6, math.inf])  # 1 Gbit/s
    assert supply.fetch.load[:, 0] == pytest.approx([2 * 1.0 + STEP_MS, 17 * 1.0 + STEP_MS])
    assert supply.source(1) is None


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (share("a"), share("b", namespace="m")),
        (share("a", agent=""), share("b")),
        (share("a"), share("b", agent="")),
        (None, share("b")),
        (share("a"), None),
        (share("a"), share("a")),
    ],
    ids=["other-namespace", "cannot-pull", "cannot-send", "no-pool", "source-without-pool", "same-arena"],
)
def test_only_arenas_of_one_namespace_with_agents_exchange_blocks(
    mine: Share | None, other: Share | None
) -> None:
    fleet = Fleet(pools_of(mine, other, share("c", namespace="z")), device=[0, 0, 0], host=[0, 20, 0])
    assert math.isinf(fleet.pull_ms(0))


def test_row_that_is_not_trusted_neither_pulls_nor_is_pulled_from() -> None:
    pools = pools_of(share("a"), share("b"), share("c"))
    fleet = Fleet(pools, device=[0, 0, 0], host=[0, 20, 9], trusted=[True, False, True])
    assert fleet.agents() == {"c:1"}
    assert math.isinf(fleet.pull_ms(1))
    assert math.isfinite(fleet.pull_ms(0))


def test_arena_can_be_asked_while_one_of_its_rows_is_trusted() -> None:
    pools = pools_of(share("a"), share("b"), share("b"))
    fleet = Fleet(pools, device=[0, 0, 0], host=[0, 20, 20], trusted=[True, False, True])
    found = fleet.supply().source(0)
    assert found is not None
    assert (found[0].agent, found[0].blocks) == ("b:1", 20)


def test_arena_whose_last_row_left_is_forgotten_and_its_number_used_again() -> None:
    pools = pools_of(share("a"), share("b"))
    pools.share(1, None)
    assert not Fleet(pools, device=[0, 0], host=[0, 20]).agents()
    pools.share(1, share("c", namespace="m"))
    assert not Fleet(pools, device=[0, 0], host=[0, 20]).agents()
    pools.share(1, share("c"))
    assert Fleet(pools, device=[0, 0], host=[0, 20]).agents() == {"c:1"}
    pools.share(0, None)
    pools.share(1, None)
    assert not pools.shared


def test_of_those_that_hold_about_the_most_one_that_is_free_to_send_is_asked() -> None:
    pools = pools_of(share("a"), *[share(f"s{n}") for n in range(4)])
    fleet = Fleet(pools, device=[0] * 5, host=[0, 5, 100, 100, 96])
    asked: list[str] = []
    for _ in range(3):
        pull = pull_from(fleet)
        pools.begin(pull, NOW)
        asked.append(pull.agent)
        if len(asked) < 3:
            pools.begin(Pull(pull.source, "elsewhere", pull.agent, 0, 0, 0.0), NOW)
    assert sorted(asked[:3]) == ["s1:1", "s2:1", "s3:1"]
    assert fleet.agents() <= {"s1:1", "s2:1", "s3:1"}  # the one that holds little is not asked for that


def test_equal_sources_take_turns_by_prompt() -> None:
    fleet = Fleet(pools_of(share("a"), share("b"), share("c")), device=[0] * 3, host=[0, 20, 20])
    assert set().union(*(fleet.agents(salt) for salt in range(8))) == {"b:1", "c:1"}
    assert fleet.agents(3) == fleet.agents(3)


def pull_from(fleet: Fleet, now: float = NOW, at: int = 0) -> Pull:
    pull = fleet.pools.pull(fleet.supply(now), at, now)
    assert pull is not None
    return pull


def test_pull_waits_for_those_asked_for_before_until_they_should_be_over() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    first = pull_from(fleet)
    fleet.pools.begin(first, NOW)
    second = pull_from(fleet)
    assert (second.ms, second.wait_ms) == pytest.approx((first.ms, first.ms))
    assert fleet.pull_ms(0) == pytest.approx(second.total_ms)
    assert pull_from(fleet, NOW + first.ms / 2e3).wait_ms == pytest.approx(first.ms / 2)
    assert pull_from(fleet, NOW + first.ms / 1e3).wait_ms == pytest.approx(0)


def test_other_routers_are_taken_to_pull_as_much() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    first = pull_from(fleet)
    fleet.pools.begin(first, NOW, routers=3.0)
    assert pull_from(fleet).wait_ms == pytest.approx(3 * first.ms)


def test_arena_can_send_while_it_receives() -> None:
    pools = pools_of(share("a"), share("b"), share("c"))
    there = Fleet(pools, device=[0] * 3, host=[0, 20, 0])
    pools.begin(pull_from(there), NOW)  # b sends to a
    back = Fleet(pools, device=[0] * 3, host=[20, 0, 0])
    assert pull_from(back, at=1).wait_ms == 0  # a to b
    assert pull_from(there, at=2).wait_ms > 0  # b to c


def test_pair_that_brings_nothing_is_not_asked_for_a_while() -> None:
    fleet = Fleet(pools_of(share("a"), share("b"), share("c")), device=[0] * 3, host=[0, 20, 0])
    fleet.pools.end(pull_from(fleet), 0, 5000.0, NOW, failed=True)
    assert math.isinf(fleet.pull_ms(0, NOW + 0.9))
    assert math.isfinite(fleet.pull_ms(2, NOW + 0.9))  # another host may ask it
    assert math.isfinite(fleet.pull_ms(0, NOW + 1.1))


def test_arena_that_failed_somebody_is_asked_when_there_is_no_other() -> None:
    fleet = Fleet(pools_of(share("a"), share("b"), share("c")), device=[0] * 3, host=[0, 20, 20])
    failed = pull_from(fleet)
    fleet.pools.end(failed, 0, 5000.0, NOW, failed=True)
    assert {pull_from(fleet).agent, failed.agent} == {"b:1", "c:1"}


def test_pull_that_found_everything_there_already_says_nothing_of_the_pair() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    fleet.pools.end(pull_from(fleet), 0, 0.1, NOW, failed=False)
    assert len(fleet.pools.speeds) == 0


def test_speed_of_a_pull_counts_from_the_next_decision_on() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    pull = pull_from(fleet)
    fleet.pools.end(pull, pull.bytes, pull.ms / 10, NOW, failed=False)
    assert pull_from(fleet).ms == pytest.approx(pull.ms / 10, rel=0.05)
    assert fleet.pull_ms(0) == pytest.approx(pull_from(fleet).total_ms)


def test_time_that_a_pull_waited_for_others_is_not_held_against_the_pair() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    first = pull_from(fleet)
    fleet.pools.begin(first, NOW)
    second = pull_from(fleet)
    fleet.pools.end(second, second.bytes, second.total_ms, NOW + 1, failed=False)
    assert pull_from(fleet, NOW + 99).ms == pytest.approx(first.ms, rel=0.05)


def test_agent_that_moved_is_asked_at_its_new_address() -> None:
    fleet = Fleet(pools_of(share("a"), share("b"), share("b")), device=[0] * 3, host=[0, 20, 20])
    fleet.pools.share(2, share("b", agent="b:2"))
    assert pull_from(fleet).agent == "b:2"


def test_arena_that_was_avoided_is_asked_when_its_agent_has_moved() -> None:
    fleet = Fleet(pools_of(share("a"), share("b"), share("b")), device=[0] * 3, host=[0, 20, 20])
    for _ in range(6):
        fleet.pools.end(pull_from(fleet, NOW + 99), 0, 5000.0, NOW, failed=True)
        fleet.pools.relax()
    assert math.isinf(fleet.pull_ms(0, NOW + 9))
    fleet.pools.share(2, share("b"))  # says what it said before
    assert math.isinf(fleet.pull_ms(0, NOW + 9))
    fleet.pools.share(2, share("b", agent="b:2"))
    assert math.isfinite(fleet.pull_ms(0, NOW + 9))
    assert pull_from(fleet, NOW + 9).agent == "b:2"


def test_host_whose_own_agent_has_moved_pulls_again() -> None:
    fleet = Fleet(pools_of(share("a"), share("b")), device=[0, 0], host=[0, 20])
    fleet.pools.end(pull_from(fleet), 0, 5000.0, NOW, failed=True)
    assert math.isinf(fleet.pull_ms(0))
    fleet.pools.share(0, share("a", agent="a:2"))
    assert math.isfinite(fleet.pull_ms(0))


def naive(fleet: Fleet, shares: list[Share | None], row: int) -> tuple[int, int]:
    """Blocks that this row need not compute by itself, and with the best of the others."""
    trusted = fleet.trusted or [True] * len(shares)
    mine = shares[row]
    if not trusted[row]:
        return 0, 0
    own = fleet.device[row] if mine is None else max(fleet.device[row], fleet.host[row])
    best = own
    for other, there in enumerate(shares):
        if mine is None or there is None or not (mine.agent and trusted[other]):
            continue
        sends = any(s is not None and s.key == there.key and s.agent for s in shares)
        if sends and there.arena != mine.arena and there.namespace == mine.namespace:
            best = max(best, fleet.host[other])
    return own, best


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Share | None], list[int], list[int], list[bool], list[int]]:
    count = draw(st.integers(1, 12))
    shares = st.one_of(
        st.none(),
        st.builds(
            lambda arena, space, agent: share(arena, namespace=space, agent=agent and f"{arena}:1"),
            st.sampled_from("abcd"),
            st.sampled_from("nm"),
            st.sampled_from(["", "yes", "yes"]),
        ),
    )
    listed = draw(st.lists(shares, min_size=count, max_size=count))
    depths = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    return listed, draw(depths), draw(depths), draw(flags), draw(st.permutations(range(count)))


@settings(deadline=None, max_examples=300)
@given(fleets())
def test_rows_reach_as_deep_as_anybody_who_may_be_asked(
    given_: tuple[list[Share | None], list[int], list[int], list[bool], list[int]],
) -> None:
    """Over rows that share arenas, have none, come in any order and left others behind."""
    shares, device, host, trusted, order = given_
    pools = Pools()
    for row in order:  # another life of each row before
        pools.share(row, share("z") if row % 2 else share("a", namespace="m"))
    for row in order:
        pools.share(row, shares[row])
    # Who shares an arena says the same of it, and nobody without one says anything.
    said = {s.key: host[row] for row, s in enumerate(shares) if s is not None}
    host = [said[s.key] if (s := shares[row]) is not None else 0 for row in range(len(shares))]
    fleet = Fleet(pools, device, host, trusted=trusted)
    supply = fleet.supply()
    wanted = [naive(fleet, shares, row) for row in range(len(shares))]
    pull = supply.fetch.pull
    alone = supply.cached if pull is None else supply.cached[0]
    assert (alone // BLOCK).tolist() == [own for own, _ in wanted]
    reach = alone if pull is None else np.where(np.isfinite(pull), supply.cached[1], alone)
    assert (reach // BLOCK).tolist() == [best for _, best in wanted]
    for row in range(len(shares)):
        assert (supply.source(row) is not None) == (pull is not None and bool(np.isfinite(pull[row])))
        found = pools.pull(supply, row, NOW)
        if found is not None:
            assert found.bytes == (wanted[row][1] - wanted[row][0]) * BLOCK_BYTES
            assert pull is not None
            assert pull[row] == pytest.approx(found.total_ms)


def test_any_number_of_rows_and_arenas_fits() -> None:
    pools = Pools()
    for row in range(100):
        pools.share(row, share(f"host-{row // 2}"))
    for row in range(0, 100, 4):
        pools.share(row, None)
        pools.share(row + 1, None)
    fleet = Fleet(pools, device=[0] * 100, host=[0] * 98 + [9, 9])
    assert fleet.agents() == {"host-49:1"}
    pull = fleet.supply().fetch.pull
    assert pull is not None
    assert np.isfinite(pull).sum() == 48
