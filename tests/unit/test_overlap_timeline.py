"""Schedules on two resources: examples by hand, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.overlap.plan import CHUNK_COUNTS
from workers.overlap.schedule import Action, Op, forward
from workers.overlap.timeline import ALONE, Contention, Timeline, bound, simulate

MATMUL, NEXT = Action.O_PROJ, Action.MLP
REDUCE, AWAIT = Action.REDUCE_ATTENTION, Action.AWAIT_ATTENTION
SECONDS = st.floats(0.01, 20)
LAYERS = 3


def per_action(**seconds: float) -> Callable[[Op], float]:
    return lambda op: seconds.get(op.action.value, 0.0)


class Times(NamedTuple):
    """Of one layer, uncut."""

    attention: float
    qkv: float
    o_proj: float
    mlp: float
    all_reduce: float

    @property
    def compute(self) -> float:
        return self.qkv + self.o_proj + self.mlp

    def shared_out(self, chunks: int) -> Callable[[Op], float]:
        """Each chunk takes its even share; attention is not cut."""
        whole = {
            Action.ATTENTION: self.attention * chunks,
            Action.QKV: self.qkv,
            Action.O_PROJ: self.o_proj,
            Action.MLP: self.mlp,
            Action.REDUCE_ATTENTION: self.all_reduce,
            Action.REDUCE_MLP: self.all_reduce,
        }
        return lambda op: whole.get(op.action, 0.0) / chunks


def layer_of(chunks: int, times: Times, contention: Contention = ALONE) -> Timeline:
    """One layer in the midst of others."""
    longer, shorter = (
        simulate(forward(layers, chunks), times.shared_out(chunks), contention)
        for layers in (LAYERS, LAYERS - 1)
    )
    return Timeline(
        longer.total_s - shorter.total_s,
        longer.exposed_s - shorter.exposed_s,
        longer.channel_s - shorter.channel_s,
    )


def test_an_all_reduce_hides_behind_the_other_chunk() -> None:
    ops = [Op(MATMUL, 0), Op(REDUCE, 0), Op(MATMUL, 1), Op(REDUCE, 1), Op(AWAIT, 0), Op(AWAIT, 1)]
    assert simulate(ops, per_action(o_proj=3.0, reduce_attention=2.0)) == Timeline(8.0, 2.0, 4.0)


def test_the_channel_serves_one_all_reduce_at_a_time() -> None:
    ops = [
        Op(MATMUL, 0),
        Op(REDUCE, 0),
        Op(MATMUL, 1),
        Op(REDUCE, 1),
        Op(AWAIT, 0),
        Op(NEXT, 0),
        Op(AWAIT, 1),
    ]
    # The second waits for the first until 6 and ends at 11; compute is done at 7.
    assert simulate(ops, per_action(o_proj=1.0, mlp=1.0, reduce_attention=5.0)) == Timeline(11.0, 8.0, 10.0)


def test_an_all_reduce_that_nothing_awaits_counts_up_to_the_end() -> None:
    ops = [Op(MATMUL, 0), Op(REDUCE, 0), Op(NEXT, 1)]
    assert simulate(ops, per_action(o_proj=1.0, mlp=2.0, reduce_attention=5.0)) == Timeline(3.0, 0.0, 2.0)


def test_contention_slows_only_what_runs_together() -> None:
    ops = [Op(MATMUL, 0), Op(REDUCE, 0), Op(NEXT, 1), Op(AWAIT, 0)]
    times = per_action(o_proj=4.0, mlp=2.0, reduce_attention=4.0)
    # From 4 on both: the matmul's 2 s take 3 s, in which 3 / 1.5 s of the AllReduce are done; 2 s are left.
    assert simulate(ops, times, Contention(compute=1.5, channel=1.5)) == Timeline(9.0, 2.0, 5.0)
    # The AllReduce ends first: 4 s take 4 s, in which 2 of the matmul's 6 are done.
    long_matmul = per_action(o_proj=4.0, mlp=6.0, reduce_attention=4.0)
    assert simulate(ops, long_matmul, Contention(compute=2.0)) == Timeline(12.0, 0.0, 4.0)


def test_a_wait_without_its_all_reduce_is_refused() -> None:
    with pytest.raises(ValueError, match="was not issued"):
        simulate([Op(MATMUL, 0), Op(AWAIT, 0)], per_action())
    with pytest.raises(ValueError, match="was not issued"):
        simulate([Op(REDUCE, 1), Op(AWAIT, 0)], per_action(reduce_attention=1.0))


@pytest.mark.parametrize("done", [0.0, 5.0])
def test_a_buffer_reduced_again_before_its_wait_is_refused(done: float) -> None:
    ops = [Op(REDUCE, 0), Op(MATMUL, 1), Op(REDUCE, 0)]
    with pytest.raises(ValueError, match="issued again"):
        simulate(ops, per_action(o_proj=done, reduce_attention=1.0))


@pytest.mark.parametrize("factors", [(0.9, 1.0), (1.0, 0.5), (math.nan, 1.0), (1.0, math.inf)])
def test_contention_never_speeds_up(factors: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Contention(*factors)


TIMES = st.builds(Times, st.floats(0, 20), SECONDS, SECONDS, SECONDS, SECONDS)
CHUNKS = st.sampled_from(CHUNK_COUNTS)
CONTENTION = st.builds(Contention, st.floats(1, 3), st.floats(1, 3))


@settings(deadline=None)
@given(TIMES, CHUNKS, CONTENTION)
def test_compute_and_waiting_make_up_the_whole_time(
    times: Times, chunks: int, contention: Contention
) -> None:
    done = simulate(forward(LAYERS, chunks), times.shared_out(chunks), contention)
    m = times.all_reduce
    compute = LAYERS * (times.attention + times.compute)
    computing = done.total_s - done.exposed_s
    assert compute * (1 - 1e-9) <= computing <= compute * contention.compute * (1 + 1e-9)
    assert 2 * LAYERS * m * (1 - 1e-9) <= done.channel_s <= 2 * LAYERS * m * contention.channel * (1 + 1e-9)
    assert max(compute, done.channel_s) * (1 - 1e-9) <= done.total_s


@settings(deadline=None)
@given(TIMES, CHUNKS, CONTENTION)
def test_contention_never_makes_a_schedule_faster(times: Times, chunks: int, contention: Contention) -> None:
    ops, seconds = forward(LAYERS, chunks), times.shared_out(chunks)
    assert simulate(ops, seconds, contention).total_s >= simulate(ops, seconds).total_s * (1 - 1e-9)


@settings(deadline=None)
@given(TIMES)
def test_one_chunk_hides_nothing(times: Times) -> None:
    m = times.all_reduce
    one = layer_of(1, times)
    assert one.total_s == pytest.approx(times.attention + times.compute + 2 * m)
    assert one.exposed_s == pytest.approx(2 * m)


@settings(deadline=None)
@given(TIMES, CHUNKS, CONTENTION)
def test_no_number_of_chunks_beats_the_bound(times: Times, chunks: int, contention: Contention) -> None:
    m = times.all_reduce
    stock = times.attention + times.compute + 2 * m
    speed_up = stock / layer_of(chunks, times, contention).total_s
    assert speed_up <= bound(times.attention, times.compute, m) * (1 + 1e-6)


@settings(deadline=None, max_examples=40)
@given(TIMES)
def test_finer_chunks_are_never_slower_as_long_as_a_chunk_costs_nothing_of_its_own(
    times: Times,
) -> None:
    m = times.all_reduce
    best = times.attention + max(times.compute, 2 * m)
    fine = layer_of(40, times)
    coarse = layer_of(4, times)
    assert fine.total_s <= coarse.total_s * (1 + 1e-6)
    assert fine.total_s >= best * (1 - 1e-6)


def test_the_bound_is_two_where_both_sides_are_equal_and_nothing_else_runs() -> None:
    assert bound(0, 10, 5) == 2.0
    assert bound(10, 10, 5) == 1.5
    assert bound(3, 10, 0) == 1.0
    assert bound(0, 0, 0) == 1.0


def test_a_layer_of_the_1_gbit_link_has_the_bound_that_was_measured_against() -> None:
    stock, best = 12 + 2 * 9.9, 19.8
    assert bound(0, 12, 9.9) == pytest.approx(stock / best)
