"""The terms of the predicted time, one property each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router.cost import (
    CostSettings,
    Prediction,
    RowLoad,
    attention_pairs,
    predict,
    prefill_ms,
    usable_cached,
)

SPEED = {"t0": 10.0, "a": 1.0, "b": 0.001, "d": 2.0, "overhead": 5.0}


def load(count: int = 1, **columns: float | list[float]) -> RowLoad:
    given: dict[str, float | list[float]] = {
        "sequences": 0.0,
        "backlog": 0.0,
        "backlog_pairs": 0.0,
        "max_sequences": math.inf,
        "max_batch_tokens": math.inf,
        "tokens_left": 0.0,
        "decode_step_ms": 0.0,
        **SPEED,
        **columns,
    }
    return RowLoad(**{name: np.broadcast_to(np.asarray(v, float), (count,)) for name, v in given.items()})


def predicted(
    rows: RowLoad,
    cached: list[int] | None = None,
    *,
    prompt_tokens: int = 1000,
    settings: CostSettings | None = None,
    expected_tokens: float = 100.0,
    affinity: float = 0.0,
) -> Prediction:
    count = len(rows.a)
    return predict(
        rows,
        prompt_tokens=prompt_tokens,
        cached=np.array(cached or [0] * count, np.int64),
        sequences=1,
        expected_tokens=expected_tokens,
        affinity=np.full(count, affinity),
        settings=settings or CostSettings(),
    )


def test_prefill_counts_every_pair_of_causal_attention() -> None:
    """The quadratic term is the number of (token, earlier token) pairs, whatever is cached."""
    whole = prefill_ms(np.zeros(1), np.zeros(1), np.ones(1), 1000.0, 0.0)[0]
    parts = sum(prefill_ms(np.zeros(1), np.zeros(1), np.ones(1), 100.0, c)[0] for c in range(0, 1000, 100))
    assert whole == parts == 1000 * 1000 / 2


def test_ttft_is_the_sum_of_its_terms() -> None:
    p = predicted(load(2, sequences=[3, 9], backlog=[0, 700], max_batch_tokens=512.0), [0, 512])
    assert p.ttft == pytest.approx(p.queue + p.prefill + p.fetch + p.interference + p.overhead)
    assert p.score == pytest.approx(p.ttft + p.harm - p.affinity)


def test_cached_tokens_save_their_prefill_and_no_more() -> None:
    p = predicted(load(2), [0, 512])
    assert p.prefill[0] == pytest.approx(10 + 1000 + 0.001 * 1000 * 500)
    assert p.prefill[1] == pytest.approx(10 + 488 + 0.001 * 488 * (512 + 244))


def test_backlog_is_waited_for() -> None:
    p = predicted(load(2, backlog=[0, 300]))
    assert p.queue.tolist() == [0.0, 300.0]


def test_long_prompt_ahead_counts_more_than_many_short_ones_of_as_many_tokens() -> None:
    pairs = [attention_pairs(85_000.0, 0.0), 85 * attention_pairs(1000.0, 0.0)]
    p = predicted(load(2, backlog=[85_000, 85_000], backlog_pairs=pairs))
    assert p.queue[0] == pytest.approx(85_000 + 0.001 * 85_000 * 85_000 / 2)
    assert p.queue[0] / p.queue[1] == pytest.approx((1 + 42.5) / (1 + 0.5))


def test_prompt_ahead_is_waited_for_as_long_as_its_own_prefill_takes() -> None:
    p = predicted(load(1), [512], prompt_tokens=4000)
    behind = predicted(load(1, backlog=3488, backlog_pairs=attention_pairs(3488.0, 512.0)))
    assert behind.queue[0] == pytest.approx(p.prefill[0] - SPEED["t0"])


def test_queue_of_one_differs_from_none_by_one_request_only() -> None:
    """Normalised scores make queue 0 against 1 look like 0 against 100 (field note 14)."""
    p = predicted(load(3, sequences=[0, 1, 100]))
    assert p.score[1] - p.score[0] == pytest.approx((p.score[2] - p.score[0]) / 100)


@pytest.mark.parametrize("cached", [0, 992])
def test_load_counts_whether_or_not_anything_is_cached(cached: int) -> None:
    """A load term that vanishes without overlap sent 448 of 448 requests to one replica (field note 9)."""
    p = predicted(load(3, sequences=[0, 4, 8]), [cached] * 3)
    assert p.score[0] < p.score[1] < p.score[2]


def test_running_decodes_slow_each_step_of_a_prefill() -> None:
    p = predicted(load(2, sequences=[5, 5], max_batch_tokens=[1000.0, 250.0]))
    assert p.interference.tolist() == [5 * 2.0, 4 * 5 * 2.0]


def test_full_batch_waits_for_a_sequence_to_end() -> None:
    """One too many of 8, each with 40 tokens of 20 ms left: one of them ends every 100 ms."""
    columns = {"max_sequences": 8.0, "tokens_left": 40.0, "decode_step_ms": 20.0}
    p = predicted(load(3, sequences=[7, 8, 10], **columns))
    assert p.queue == pytest.approx([0.0, 100.0, 300.0])


def test_more_running_than_the_batch_holds_do_not_slow_a_step() -> None:
    p = predicted(load(2, sequences=[8, 80], max_sequences=8.0))
    assert p.running.tolist() == [8.0, 8.0]


def test_harm_grows_with_those_who_suffer_it() -> None:
    p = predicted(load(2, sequences=[0, 10]), settings=CostSettings(harm_weight=1.0))
    prefill = p.prefill[0]
    assert p.harm[0] == pytest.approx(prefill)  # whoever comes next
    assert p.harm[1] == pytest.approx(11 * prefill + 10 * 2.0 * 100)


def test_without_weight_there_is_no_harm() -> None:
    assert predicted(load(1, sequences=20), settings=CostSettings(harm_weight=0.0)).harm[0] == 0


def test_waiting_for_a_sibling_is_slightly_better_than_computing_the_same_elsewhere() -> None:
    """Equal time to the first token, half the work: joining wins, though by no more than the weight."""
    idle = predicted(load(1))
    joined = predicted(load(1, backlog=idle.prefill[0] - SPEED["t0"]), [1000])
    assert joined.ttft[0] == pytest.approx(idle.ttft[0])
    assert joined.score[0] < idle.score[0]
    assert idle.score[0] - joined.score[0] <= CostSettings().harm_weight * idle.prefill[0]


def test_affinity_is_a_credit_in_ms() -> None:
    assert predicted(load(1), affinity=20.0).score == pytest.approx(predicted(load(1)).score - 20.0)


def test_last_prompt_token_is_always_computed() -> None:
    """A prompt of exactly n blocks that is wholly resident still computes its last block."""
    assert usable_cached(np.array([0, 1, 4, 9]), 16, 64).tolist() == [0, 16, 48, 48]
    assert usable_cached(np.array([4]), 16, 65).tolist() == [64]
    assert usable_cached(np.array([4]), 16, 1).tolist() == [0]
    assert usable_cached(np.array([4]), 0, 65).tolist() == [0]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_that_are_no_weights_are_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="harm_weight must be"):
        CostSettings(harm_weight=value)
