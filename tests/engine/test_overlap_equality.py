"""Split steps give what stock steps give: tokens and logprobs, bit for bit in float32 at TP=2.

A sum of two addends does not depend on their order, and a row of a float32 matmul not on the rows beside it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from overlap_engine import BLOCK, STEP_TOKENS, Answer, Arrival, Engine, Logprobs, started
from tiny_models import VOCABULARY, build

from workers.checkpoint import prepare
from workers.overlap.plan import forced
from workers.overlap.report import OverlapReport

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNKS = ("2", "3", "4", "8")
LENGTHS = (
    1,
    2,
    *(n + d for n in (BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 256, STEP_TOKENS) for d in (-1, 0, 1)),
)
KV_BYTES = 3 << 20
"""128 blocks of a tiny model."""

BF16_TOLERANCE = 0.5
"""Of a logprob of SmolLM2 in bfloat16: its logits reach 42 here, and from 32 on bfloat16 has steps of 0.25.

Its matmul kernels choose their tiles, and with them the order of their sums, by the number of rows. Chunks of
some 96 rows were still equal bit for bit; those of 32 to 64 differed by up to 0.3.
"""

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, cache: Path) -> Iterator[Engine]:
    """One at a time: pytest sorts the tests by it. Named by family, or "smollm2" and the dtype."""
    family, _, dtype = str(request.param).partition(" ")
    if family == "smollm2":
        with started(prepare(family, 2).path, cache, dtype, kv_cache_memory_bytes=1 << 28) as engine:
            yield engine
        return
    with started(build(family, cache / family), cache, kv_cache_memory_bytes=KV_BYTES) as engine:
        yield engine


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", names, indirect=True)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(VOCABULARY) for _ in range(length))


def steps_since(engine: Engine) -> list[tuple[int, int]]:
    """(tokens, chunks) of each step since the last call, on which all ranks agree."""
    first, *others = engine.ask("steps")
    assert all(other == first for other in others)
    found: list[tuple[int, int]] = first
    return found


def assert_split_as_told(engine: Engine, chunks: str) -> None:
    """The steps at or above the threshold, and no others, took the overlapped path; some did."""
    plan = forced(int(chunks))
    steps = steps_since(engine)
    assert [(tokens, plan.chunks(tokens)) for tokens, _ in steps] == steps
    assert any(split > 1 for _, split in steps)


def assert_equal(engine: Engine, arrivals: Sequence[Arrival]) -> None:
    stock = engine.run(arrivals, "off")
    steps_since(engine)
    for chunks in CHUNKS:
        assert engine.run(arrivals, chunks).answers == stock.answers, f"{chunks} chunks"
        assert_split_as_told(engine, chunks)


@on("llama", "mistral", "qwen2", "qwen3", "qwen3moe")
def test_prompts_together_are_answered_bit_for_bit(engine: Engine) -> None:
    arrivals = [Arrival(prompt(n, n), 6, prompt_logprobs=True) for n in LENGTHS]
    assert_equal(engine, arrivals)


@on("llama", "mistral", "qwen2", "qwen3", "qwen3moe")
def test_prompts_of_lengths_around_chunks_and_blocks_are_answered_bit_for_bit(engine: Engine) -> None:
    for length in LENGTHS:
        arrival = Arrival(prompt(length, length), 2, prompt_logprobs=True)
        stock = engine.run([arrival], "off")
        steps_since(engine)
        for chunks in CHUNKS:
            assert engine.run([arrival], chunks).answers == stock.answers, f"{length} tokens, {chunks} chunks"
            tokens, split = steps_since(engine)[0]
            assert (tokens, split) == (min(length, STEP_TOKENS), forced(int(chunks)).chunks(tokens))


@on("llama")
def test_a_prompt_of_several_steps_is_answered_bit_for_bit(engine: Engine) -> None:
    arrivals = [Arrival(prompt(1, 900), prompt_logprobs=True), Arrival(prompt(2, 600), step=1)]
    assert_equal(engine, arrivals)


@on("llama", "qwen3moe")
def test_prompts_that_join_decoding_requests_are_answered_bit_for_bit(engine: Engine) -> None:
    arrivals = [Arrival(prompt(n, 20 + n), 24) for n in range(6)]
    arrivals += [Arrival(prompt(10 + n, 90 + 60 * n), 6, step=3 + 3 * n) for n in range(6)]
    assert engine.run(arrivals, "off").mixed >= 6
    assert_equal(engine, arrivals)


@on("llama", "qwen3")
def test_prompts_with_cached_prefixes_are_answered_bit_for_bit(engine: Engine) -> None:
    first = prompt(5, 300)
    shared = first[: 6 * BLOCK]
    arrivals = [
        Arrival(first, 8),
        Arrival(first, 8, step=10),
        Arrival(shared + prompt(6, 290), 8, step=12),
        Arrival(shared + prompt(7, 100), 8, step=12),
    ]
    cached = [answer.cached for answer in engine.run(arrivals, "4").answers]
    assert cached == [0, 9 * BLOCK, 6 * BLOCK, 6 * BLOCK]
    assert_equal(engine, arrivals)


@on("llama", "qwen2")
def test_preempted_requests_are_answered_bit_for_bit(engine: Engine) -> None:
    arrivals = [Arrival(prompt(n, 60), 64) for n in range(40)]
    stock = engine.run(arrivals, "off")
    assert stock.preemptions > 0
    for chunks in ("2", "4"):
        steps_since(engine)
        split = engine.run(arrivals, chunks)
        assert (split.answers, split.preemptions) == (stock.answers, stock.preemptions)
        assert_split_as_told(engine, chunks)


@on("llama")
def test_ranks_of_different_speeds_agree_for_a_thousand_mixed_steps(engine: Engine) -> None:
    dice = random.Random(0)
    arrivals = [
        Arrival(prompt(step, dice.choice((5, 40, 64, 100, 200, 400))), dice.randint(4, 12), step)
        for step in range(0, 1000, 4)
    ]
    modes = [dice.choice(("off", "2", "3", "4", "8")) for _ in range(2000)]
    stock = engine.run(arrivals, "off")
    assert stock.steps >= 1000
    assert stock.mixed >= 100
    steps_since(engine)
    engine.ask("stumble", 1, 0.003, 0.05)
    try:
        uneven = engine.run(arrivals, lambda step: modes[step // 3])
    finally:
        engine.ask("steady")
    assert uneven.answers == stock.answers
    taken = {chunks for _, chunks in steps_since(engine)}
    assert taken == {1, 2, 3, 4, 8}


@on("llama")
def test_every_rank_reports_what_it_did(engine: Engine) -> None:
    before: list[OverlapReport] = engine.ask("report")
    engine.run([Arrival(prompt(1, 200), 5)], "4")
    after: list[OverlapReport] = engine.ask("report")
    for old, new in zip(before, after, strict=True):
        assert (new.overlapped.steps, new.overlapped.tokens) == (
            old.overlapped.steps + 1,
            old.overlapped.tokens + 200,
        )
        assert (new.stock.steps, new.stock.tokens) == (old.stock.steps + 4, old.stock.tokens + 4)
        assert new.overlapped.exposed_s <= new.overlapped.all_reduce_s <= new.overlapped.forward_s
    assert [report.rank for report in after] == [0, 1]
    assert {(report.path, report.mode, report.model) for report in after} == {
        ("overlapped", "4", "LlamaForCausalLM")
    }


@on("llama")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("none", ""),
        ("quantization", "quantization fp8"),
        ("quantised linear", "o_proj is quantised"),
        ("layer class", "ParallelResidualLayer: not one of the decoder families"),
        ("attention class", "the attention is a GatedAttention"),
        ("lora linear", "down_proj is a RowParallelLinearWithLoRA"),
        ("final norm", "the final norm is a OtherNorm"),
        ("auxiliary states", "speculative decoding"),
    ],
)
def test_a_model_that_cannot_be_split_says_why(engine: Engine, change: str, why: str) -> None:
    for said in engine.ask("why_not_split", change):
        assert (why in said) if why else not said


@on("llama", "qwen3moe")
def test_ranks_agree_on_a_measured_plan_and_find_it_again(engine: Engine, cache: Path) -> None:
    lines = measured_anew(engine, cache)
    assert ["measured in" in line for line in lines] == [True, True], lines
    plans = [report.plan for report in engine.ask("report")]
    assert plans[0] == plans[1]
    assert [row.tokens for row in plans[0].rows] == [64, 128, 256, STEP_TOKENS]
    engine.ask("trust_link", True)
    lines = measured(engine)
    assert ["from the cache" in line for line in lines] == [True, True], lines
    again = [report.plan for report in engine.ask("report")]
    assert again == [replace(plans[0], origin="cached")] * 2
    arrivals = [Arrival(prompt(n, n), 4) for n in (64, 200, 700)]
    assert engine.run(arrivals, "auto").answers == engine.run(arrivals, "off").answers


@on("llama")
def test_a_plan_of_other_hardware_or_another_model_is_not_used(engine: Engine, cache: Path) -> None:
    engine.ask("trust_link", True)
    measured_anew(engine, cache)
    (mine,) = plan_files(cache)
    own = json.loads(mine.read_text())
    # The same name, so that only what the file says of itself can give it away.
    mine.write_text(json.dumps({**own, "fingerprint": {**own["fingerprint"], "device": "another CPU"}}))
    assert all("is another one's: device 'another CPU'" in line for line in measured(engine))
    # Measured anew, and kept: what was refused is gone.
    assert json.loads(mine.read_text())["fingerprint"] == own["fingerprint"]
    mine.rename(mine.with_name("0" * 32 + ".json"))
    other = {**own["fingerprint"], "model": "another model"}
    mine.with_name("0" * 32 + ".json").write_text(json.dumps({**own, "fingerprint": other}))
    assert all("no plan was measured yet" in line for line in measured(engine))


@on("llama")
def test_a_plan_of_a_link_that_has_changed_is_not_used(engine: Engine, cache: Path) -> None:
    measured_anew(engine, cache)
    engine.ask("trust_link", False)
    engine.ask("slow_channel", 0.03)
    try:
        assert all("the link has changed: an AllReduce" in line for line in measured(engine))
    finally:
        engine.ask("slow_channel", 0.0)


def plan_files(cache: Path) -> list[Path]:
    return sorted((cache / "overlap-plans").glob("*.json"))


def forget_plans(cache: Path) -> None:
    for file in plan_files(cache):
        file.unlink()


def measured_anew(engine: Engine, cache: Path) -> list[str]:
    """What each rank says of a plan that no cached one can stand for."""
    engine.ask("set_overlap", "auto")  # the first time measures and keeps a plan of its own
    forget_plans(cache)
    return measured(engine)


def measured(engine: Engine) -> list[str]:
    """What each rank says of the plan it now has."""
    engine.ask("set_overlap", "auto")
    lines: list[str] = engine.ask("plan_overlap")
    return lines


@on("smollm2 float32")
def test_smollm2_is_answered_bit_for_bit(engine: Engine) -> None:
    assert_equal(engine, english())


@on("smollm2 bfloat16")
def test_smollm2_in_bfloat16_agrees_within_rounding(engine: Engine) -> None:
    arrivals = english()
    stock = engine.run(arrivals, "off")
    steps_since(engine)
    for chunks in CHUNKS:
        split = engine.run(arrivals, chunks)
        assert_split_as_told(engine, chunks)
        worst = max(difference(a, b) for a, b in zip(stock.answers, split.answers, strict=True))
        print(f"{chunks} chunks: logprobs differ by up to {worst:.4f}")
        assert worst <= BF16_TOLERANCE


def english() -> list[Arrival]:
    """Prompts that SmolLM2 knows its way in."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare("smollm2", 2).path)
    tokens = tokenizer(TEXT.read_text())["input_ids"]
    return [Arrival(tuple(tokens[n : 2 * n]), 8, prompt_logprobs=True) for n in (33, 64, 290)]


def difference(stock: Answer, split: Answer) -> float:
    """Largest between logprobs of the same token after the same tokens.

    Where greedy tokens part ways, each run's choice beats the other's by less than what they differ by.
    """
    pairs: list[tuple[Logprobs, Logprobs]] = list(
        zip(stock.prompt_logprobs, split.prompt_logprobs, strict=True)
    )
    for position, (mine, its) in enumerate(zip(stock.tokens, split.tokens, strict=True)):
        pairs.append((stock.logprobs[position], split.logprobs[position]))
        if mine != its:
            break
    return max(float(abs(a[token] - b[token])) for a, b in pairs for token in a.keys() & b.keys())
