"""Blocks of other hosts are brought once, a bounded number at a time, by a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers_kvagent import (
    DIGEST,
    LONG_S,
    ScriptedTransport,
    arena_in,
    eventually,
    name,
    names,
    ready_numbers,
    until_ready,
)
from helpers_kvpool import PART, RANKS, assert_ready_blocks_are_true, key, store

from workers.kvpool.admission import Policy
from workers.kvpool.agent_observer import Pulled
from workers.kvpool.arena import Arena
from workers.kvpool.byte_budget import ByteBudget
from workers.kvpool.host_arenas import HostArenas
from workers.kvpool.peers import Peers
from workers.kvpool.pull import Puller, PullLimits
from workers.kvpool.transport import FalseBlocksError, PeerError
from workers.kvpool.work_threads import WorkThreads

ONE_BY_ONE = PullLimits(batch_bytes=1)
BLOCK_BYTES = RANKS * PART


class Setting:
    """A puller over one arena, whose peers follow a script."""

    def __init__(self, arena: Arena, transport: ScriptedTransport, limits: PullLimits) -> None:
        self.arena = arena
        self.transport = transport
        self.peers = Peers(lambda: 100.0)  # no time passes for those who are avoided
        self.threads = WorkThreads(4, "test")
        self.arenas = HostArenas(arena.path.parent)
        self.puller = Puller(
            self.arenas, transport, self.peers, self.threads, limits=limits, clock=lambda: 100.0
        )

    async def pull(
        self, numbers: Iterable[int], timeout_s: float = 2 * LONG_S, source: str = "peer:1"
    ) -> Pulled:
        return await self.puller.pull(source, DIGEST, names(numbers), timeout_s)

    def begin(self, numbers: Iterable[int], timeout_s: float = 2 * LONG_S) -> asyncio.Task[Pulled]:
        return asyncio.create_task(self.pull(numbers, timeout_s))

    async def until_ready(self, *numbers: int) -> None:
        await until_ready(self.arena, *numbers)

    async def until_asked(self, times: int) -> None:
        await eventually(lambda: len(self.transport.asked) >= times)

    async def until_idle(self) -> None:
        await eventually(lambda: not self.transport.running and not self.puller._coming)


@asynccontextmanager
async def setting(
    folder: Path,
    transport: ScriptedTransport,
    limits: PullLimits = ONE_BY_ONE,
    *,
    slots: int = 64,
    blocks: Iterable[int] = (),
    policy: Policy = Policy.LRU,
) -> AsyncIterator[Setting]:
    with arena_in(folder, slots, blocks, policy) as arena:
        made = Setting(arena, transport, limits)
        try:
            yield made
        finally:
            await made.puller.close()
            await made.threads.close()
            made.arenas.close()
            assert_ready_blocks_are_true(arena)
            assert arena.check() == []
            assert arena.usage().writing == 0
            assert transport.running == 0


def stuck(numbers: Iterable[int], after: int = 0) -> ScriptedTransport:
    """Sends so many blocks, and then nothing for ever."""
    return ScriptedTransport.of(numbers, go=asyncio.Semaphore(after))


async def test_what_is_lacking_is_brought_and_what_is_here_is_not(tmp_path: Path) -> None:
    async with setting(tmp_path, ScriptedTransport.of(range(8)), blocks=[0, 1, 5]) as here:
        pulled = await here.pull(range(8))
        assert (pulled.blocks, pulled.size, pulled.failed) == (5, 5 * BLOCK_BYTES, "")
        assert here.transport.asked == [("peer:1", names([2, 3, 4, 6, 7]))]
        assert list(ready_numbers(here.arena, range(9))) == list(range(8))
        assert (await here.pull(range(8))).blocks == 0
        assert len(here.transport.asked) == 1


@pytest.mark.parametrize("batch_bytes", [1, BLOCK_BYTES, 3 * BLOCK_BYTES, 1 << 30])
async def test_blocks_are_stored_whatever_the_batch(tmp_path: Path, batch_bytes: int) -> None:
    limits = PullLimits(batch_bytes=batch_bytes)
    async with setting(tmp_path, ScriptedTransport.of(range(7)), limits) as here:
        assert (await here.pull(range(7))).blocks == 7
        assert list(ready_numbers(here.arena, range(7))) == list(range(7))


async def test_a_peer_that_has_fewer_is_no_bad_peer(tmp_path: Path) -> None:
    async with setting(tmp_path, ScriptedTransport.of(range(3))) as here:
        pulled = await here.pull(range(8))
        assert (pulled.blocks, pulled.failed) == (3, "peer:1 has 3 of 8 blocks only")
        assert here.peers.avoided("peer:1") == ""


async def test_several_pulls_of_one_prefix_are_one_transfer(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(6))) as here:
        pulls = [here.begin(range(4)) for _ in range(3)]
        await here.until_asked(1)
        longer = here.begin(range(6))
        await here.until_asked(2)
        for _ in range(20):
            here.transport.go.release()
        assert [pulled.blocks for pulled in await asyncio.gather(*pulls, longer)] == [4, 4, 4, 6]
        assert here.transport.asked == [("peer:1", names(range(4))), ("peer:1", names([4, 5]))]


async def test_a_pull_whose_caller_leaves_ends_its_transfer_and_keeps_what_came(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(6), after=2)) as here:
        pull = here.begin(range(6))
        await here.until_ready(0, 1)
        pull.cancel()
        await here.until_idle()
        assert list(ready_numbers(here.arena, range(6))) == [0, 1]
        assert here.puller.running == 0


async def test_a_transfer_goes_on_as_long_as_somebody_waits_for_it(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(4), after=1)) as here:
        first = here.begin(range(4))
        await here.until_ready(0)
        second = here.begin(range(4))
        await eventually(lambda: here.puller.running == 2)
        await asyncio.sleep(0.05)  # until it waits, too
        first.cancel()
        for _ in range(10):
            here.transport.go.release()
        assert (await second).failed == ""
        assert list(ready_numbers(here.arena, range(4))) == list(range(4))


async def test_a_cancel_before_the_transfer_has_begun_leaves_nothing(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(4))) as here:
        for _ in range(20):
            pull = here.begin(range(4))
            await asyncio.sleep(0.001)
            pull.cancel()
        await here.until_idle()
        assert here.puller._budget.held == 0


async def test_a_pull_ends_at_its_deadline_with_what_came(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(6), after=2)) as here:
        pulled = await here.pull(range(6), timeout_s=3.0)
        assert (pulled.blocks, pulled.failed) == (2, "peer:1 had sent 2 of 6 blocks by the deadline")
        assert list(ready_numbers(here.arena, range(6))) == [0, 1]
        assert here.peers.avoided("peer:1") == ""  # slow, and alive


async def test_blocks_of_a_batch_that_is_not_full_are_kept_at_the_deadline(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(6), after=2), PullLimits()) as here:
        assert (await here.pull(range(6), timeout_s=3.0)).blocks == 2
        assert list(ready_numbers(here.arena, range(6))) == [0, 1]


async def test_a_peer_that_sends_nothing_until_the_deadline_is_avoided(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(6))) as here:
        assert (await here.pull(range(6), timeout_s=3.0)).blocks == 0
        again = await here.pull(range(6))
        assert again.failed.startswith("peer:1 is not asked for")
        assert len(here.transport.asked) == 1


@pytest.mark.parametrize("error", [PeerError("peer:1: gone"), FalseBlocksError("peer:1: nonsense")])
async def test_a_peer_that_breaks_off_is_avoided_and_what_came_before_is_kept(
    tmp_path: Path, error: PeerError
) -> None:
    transport = ScriptedTransport.of(range(3), error=error)
    async with setting(tmp_path, transport, PullLimits()) as here:
        pulled = await here.pull(range(6))
        assert (pulled.blocks, pulled.failed) == (3, str(error))
        assert here.peers.avoided("peer:1") != ""
        assert here.puller.refused == isinstance(error, FalseBlocksError)


async def test_a_joined_transfer_that_fails_is_made_up_for_from_ones_own_peer(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(4), after=1)) as here:
        here.transport.error = PeerError("gone")
        del here.transport.numbers[name(3)]
        first = here.begin(range(4))
        await here.until_ready(0)
        second = asyncio.create_task(here.pull(range(4), source="peer:2"))
        await asyncio.sleep(0.05)
        here.transport.numbers[name(3)] = 3
        here.transport.numbers.pop(name(1))
        here.transport.go.release()
        assert (await first).failed == "gone"
        here.transport.numbers[name(1)], here.transport.error = 1, None
        for _ in range(10):
            here.transport.go.release()
        assert (await second).failed == ""
        assert here.transport.asked[-1][0] == "peer:2"


async def test_only_so_many_transfers_run_and_the_others_wait(tmp_path: Path) -> None:
    limits = PullLimits(transfers=2, batch_bytes=1)
    async with setting(tmp_path, stuck(range(40)), limits) as here:
        pulls = [here.begin([number]) for number in range(10)]
        await here.until_asked(2)
        await asyncio.sleep(0.05)
        assert len(here.transport.asked) == 2
        for _ in range(10):
            here.transport.go.release()
        assert [pulled.blocks for pulled in await asyncio.gather(*pulls)] == [1] * 10
        assert here.transport.most_running == 2


async def test_bytes_that_are_not_stored_yet_are_bounded(tmp_path: Path) -> None:
    limits = PullLimits(transfers=8, batch_bytes=1, transfer_bytes=3 * BLOCK_BYTES)
    async with setting(tmp_path, stuck(range(40)), limits) as here:
        pulls = [here.begin([number]) for number in range(8)]
        await here.until_asked(3)
        await asyncio.sleep(0.05)
        assert here.transport.most_running == 3
        for _ in range(8):
            here.transport.go.release()
        assert [pulled.blocks for pulled in await asyncio.gather(*pulls)] == [1] * 8
        assert here.puller._budget.held == 0


async def test_more_pulls_than_an_agent_takes_on_are_refused_at_once(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(4)), PullLimits(pulls=1, batch_bytes=1)) as here:
        first = here.begin(range(4))
        await here.until_asked(1)
        assert (await here.pull(range(4))).failed == "this agent is busy with 1 pulls"
        first.cancel()


async def test_a_transfer_that_waits_for_its_turn_too_long_says_so(tmp_path: Path) -> None:
    async with setting(tmp_path, stuck(range(9)), PullLimits(transfers=1)) as here:
        first = here.begin(range(4))
        await here.until_asked(1)
        assert "other transfers took until the deadline" in (await here.pull([8], timeout_s=3.0)).failed
        first.cancel()


async def test_an_arena_that_is_full_of_blocks_in_use_takes_none_and_the_transfer_ends(
    tmp_path: Path,
) -> None:
    async with setting(
        tmp_path, ScriptedTransport.of(range(9)), slots=4, blocks=[100, 101, 102, 103]
    ) as here:
        held = here.arena.lease([key(number) for number in range(100, 104)])
        pulled = await here.pull(range(4))
        assert (pulled.blocks, pulled.failed) == (0, "the arena here took 0 of 1 blocks that came")
        here.arena.release([lease for lease in held if lease is not None])


async def test_a_pull_that_the_arena_cannot_hold_is_cut_to_what_it_can(tmp_path: Path) -> None:
    async with setting(tmp_path, ScriptedTransport.of(range(9)), slots=4) as here:
        pulled = await here.pull(range(9))
        assert (pulled.blocks, pulled.failed) == (4, "the arena here has room for 4 of 9 blocks")
        assert list(ready_numbers(here.arena, range(9))) == [0, 1, 2, 3]


async def test_the_first_block_of_a_prefix_is_evicted_last(tmp_path: Path) -> None:
    async with setting(tmp_path, ScriptedTransport.of(range(3)), slots=4) as here:
        await here.pull(range(3))
        store(here.arena, [key(50), key(51), key(52)])
        assert list(ready_numbers(here.arena, range(3))) == [0]


async def test_a_pull_counts_as_demand_where_blocks_are_admitted_by_it(tmp_path: Path) -> None:
    transport = ScriptedTransport.of(range(2))
    async with setting(tmp_path, transport, slots=2, blocks=[50, 51], policy=Policy.TINYLFU) as here:
        assert (await here.pull(range(2))).blocks == 2


async def test_a_host_without_the_arena_says_so(tmp_path: Path) -> None:
    async with setting(tmp_path, ScriptedTransport.of(range(2))) as here:
        other = "0" * 32
        assert "no arena" in (await here.puller.pull("peer:1", other, names([1]), LONG_S)).failed
        with pytest.raises(ValueError, match="32 hex digits"):
            await here.puller.pull("peer:1", "../etc", names([1]), LONG_S)


async def test_an_arena_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    async with setting(tmp_path / "a", ScriptedTransport.of(range(4))) as here:
        await here.pull(range(2))
        here.arena.path.unlink()
        with arena_in(tmp_path / "a") as anew:
            assert (await here.pull(range(4))).blocks == 4
            assert list(ready_numbers(anew, range(4))) == list(range(4))


async def test_who_waits_for_bytes_gets_them_when_they_are_free() -> None:
    budget, order = ByteBudget(10), []

    async def hold(size: int, gone: asyncio.Event) -> None:
        async with budget.holding(size):
            order.append(size)
            await gone.wait()

    gone = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(hold(size, event)) for size, event in zip((6, 6, 1000), gone, strict=True)]
    await asyncio.sleep(0)
    assert (order, budget.held) == ([6], 6)
    gone[0].set()
    await tasks[0]
    await eventually(lambda: len(order) == 2)
    assert budget.held == 6
    tasks[1].cancel()
    await eventually(lambda: len(order) == 3)
    assert budget.held == 10
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.held == 0
