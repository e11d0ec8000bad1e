"""The table all ranks share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.overlap.plan import CHUNK_COUNTS, CHUNK_ROWS, Plan, PlanRow, forced
from workers.overlap.schedule import bounds

ROWS = st.lists(
    st.tuples(st.integers(1, 8192), st.sampled_from(CHUNK_COUNTS), st.floats(0, 100), st.floats(0, 100)),
    unique_by=lambda row: row[0],
    max_size=8,
).map(lambda rows: tuple(PlanRow(*row) for row in sorted(rows)))
PLANS = st.builds(Plan, ROWS, st.sampled_from(("none", "measured", "cached", "forced")))


@given(PLANS, st.integers(0, 10_000))
def test_a_step_takes_the_last_row_that_it_reaches(plan: Plan, tokens: int) -> None:
    reached = [row.chunks for row in plan.rows if row.tokens <= tokens]
    assert plan.chunks(tokens) == (reached[-1] if reached else 1)


@given(PLANS)
def test_no_step_below_the_threshold_is_split_and_the_one_at_it_is(plan: Plan) -> None:
    threshold = plan.threshold
    if threshold is None:
        assert {plan.chunks(tokens) for tokens in (0, 1, 8192, 10_000)} == {1}
    else:
        assert plan.chunks(threshold) > 1
        assert all(plan.chunks(tokens) == 1 for tokens in range(threshold))


@given(PLANS)
def test_a_plan_survives_the_wire(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_an_empty_plan_splits_nothing() -> None:
    assert Plan().chunks(100_000) == 1
    assert Plan().threshold is None


@pytest.mark.parametrize("chunks", CHUNK_COUNTS)
def test_a_forced_plan_splits_every_step_whose_chunks_get_enough_rows(chunks: int) -> None:
    plan = forced(chunks)
    assert plan.origin == "forced"
    for tokens in range(1, 300):
        assert len(bounds(tokens, plan.chunks(tokens))) == plan.chunks(tokens)
        assert plan.chunks(tokens) == (chunks if tokens >= CHUNK_ROWS * chunks else 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((PlanRow(512, 2), PlanRow(256, 4)), r"increase in tokens: \[512, 256\]"),
        ((PlanRow(512, 2), PlanRow(512, 4)), "increase"),
        ((PlanRow(512, 5), PlanRow(1024, 0)), r"not \[5, 0\]"),
        ((PlanRow(0, 2),), "one token or more"),
    ],
)
def test_a_table_that_cannot_be_is_refused(rows: tuple[PlanRow, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(rows)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rows": []},
        {"origin": "measured", "rows": [{"tokens": 4}]},
        {"origin": "measured", "rows": [{"tokens": 4, "chunks": 2, "speed": 1}]},
        {"origin": "measured", "rows": [{"tokens": 4, "chunks": 7}]},
        {"origin": "measured", "rows": [{"tokens": "4", "chunks": 2}]},
        {"origin": "measured", "rows": 4},
    ],
)
def test_what_is_no_plan_is_refused(values: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Plan.from_json(values)


def test_gain_is_the_share_of_the_stock_time_saved() -> None:
    assert PlanRow(1024, 4, stock_ms=40.0, overlapped_ms=30.0).gain == 0.25
    assert PlanRow(1024, 4).gain == 0.0
