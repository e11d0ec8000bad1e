"""Several ways to serve a prompt on one replica: the least counts, and only computing harms others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import load

from router.cost import CostSettings, Fetch, Prediction, RowLoad, predict


def predicted(
    rows: RowLoad, cached: list[list[int]], load_ms: list[list[float]], pull: list[float] | None = None
) -> Prediction:
    """`cached` and `load_ms` without a pull, and with one."""
    both = slice(None) if pull is not None else 0
    return predict(
        rows,
        prompt_tokens=1000,
        cached=np.array(cached, np.int64)[both],
        sequences=1,
        expected_tokens=100.0,
        affinity=np.zeros(len(rows.a)),
        settings=CostSettings(),
        fetch=Fetch(np.array(load_ms, float)[both], None if pull is None else np.array(pull, float)),
    )


def test_pull_is_chosen_where_it_is_quicker_than_computing() -> None:
    p = predicted(load(2), [[0, 0], [900, 900]], [[0, 0], [10, 10]], [50, 5000])
    assert p.pulls is not None
    assert p.pulls.tolist() == [True, False]
    assert p.fetch.tolist() == [60.0, 0.0]
    assert p.prefill[0] < p.prefill[1]
    assert p.ttft == pytest.approx(p.queue + p.prefill + p.fetch + p.interference + p.overhead)
    assert p.score == pytest.approx(p.ttft + p.harm - p.affinity)


def test_blocks_travel_while_the_prompts_ahead_are_computed() -> None:
    p = predicted(load(3, backlog=[0, 30, 400]), [[0] * 3, [900] * 3], [[0] * 3, [10] * 3], [50] * 3)
    assert p.fetch.tolist() == [60.0, 30.0, 10.0]


def test_fetched_tokens_harm_nobody() -> None:
    p = predicted(load(1, sequences=8), [[0], [900]], [[0], [10]], [0])
    resident = predicted(load(1, sequences=8), [[900]], [[0]])
    assert p.harm[0] == resident.harm[0]


def test_where_others_run_blocks_may_come_later_than_computing_them_would_take() -> None:
    """What computing costs the others counts."""
    alone, among = (predicted(load(1, sequences=n), [[0], [900]], [[0], [0]], [2000]) for n in (0, 8))
    assert alone.pulls is not None
    assert among.pulls is not None
    assert (alone.pulls[0], among.pulls[0]) == (False, True)


def test_loading_is_paid_for_when_it_happens_although_computing_were_quicker() -> None:
    p = predicted(load(1), [[900]], [[5000]])
    assert p.fetch.tolist() == [5000.0]
    assert p.pulls is None


TOKENS = st.lists(st.integers(0, 999), min_size=3, max_size=3)
MS = st.floats(0, 1e5)


@settings(deadline=None, max_examples=100)
@given(
    TOKENS, TOKENS, *[st.lists(MS, min_size=3, max_size=3)] * 2,
    st.lists(st.one_of(st.just(math.inf), MS), min_size=3, max_size=3),
)  # fmt: skip
def test_choice_is_as_good_as_the_better_of_both_alone(
    own: list[int], more: list[int], loads: list[float], more_loads: list[float], pull: list[float]
) -> None:
    rows = load(3, sequences=[0, 3, 9], backlog=[0, 500, 90])
    both = predicted(rows, [own, more], [loads, more_loads], pull)
    without = predicted(rows, [own], [loads])
    forced = [
        load + max(ms - queue, 0.0) for load, ms, queue in zip(more_loads, pull, both.queue, strict=True)
    ]
    alone = (without, predicted(rows, [more], [forced]))
    assert both.score.tolist() == np.minimum(alone[0].score, alone[1].score).tolist()
    assert both.pulls is not None
    for row, way in enumerate(both.pulls.tolist()):
        for term in ("prefill", "fetch", "interference", "ttft", "harm", "score"):
            assert getattr(both, term)[row] == getattr(alone[way], term)[row]
    assert np.isfinite(both.ttft).all()
