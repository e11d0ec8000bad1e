"""A step that keeps no token of a seeded request leaves that request's random numbers as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from workers.seeded import keep_seeds


class FakeRunner:
    """vLLM's model runner as far as seeds go: draws for all, takes back by an offset that a CPU has not."""

    def __init__(self, device: str, unfinished: list[bool]) -> None:
        self.device = torch.device(device)
        self.discard_request_mask = SimpleNamespace(np=np.array([*unfinished, True]))
        generators = {place: torch.Generator().manual_seed(7) for place in range(len(unfinished))}
        self.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)

    def _sample(self) -> list[float]:
        return [float(torch.rand(1, generator=one)) for _, one in sorted(self.input_batch.generators.items())]

    def _bookkeeping_sync(self) -> str:
        for place in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            if (generator := self.input_batch.generators.get(int(place))) is not None:
                generator.set_offset(generator.get_offset() - 4)
        return "books"

    def step(self) -> list[float]:
        drawn = self._sample()
        assert self._bookkeeping_sync() == "books"
        return drawn


def test_vllm_itself_cannot_take_the_draw_back_on_cpu() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        FakeRunner("cpu", [True]).step()


def test_a_prompt_in_three_steps_gives_the_token_of_a_prompt_in_one() -> None:
    runner: Any = FakeRunner("cpu", [True, False])
    keep_seeds(runner)
    first, second = runner.step(), runner.step()
    assert first[0] == second[0]
    assert first[1] != second[1]
    runner.discard_request_mask.np[0] = False
    whole: Any = FakeRunner("cpu", [False, False])
    assert runner.step()[0] == whole.step()[0]
    assert sorted(runner.input_batch.generators) == [0, 1]


def test_a_request_without_a_seed_is_passed_over() -> None:
    runner: Any = FakeRunner("cpu", [True, False])
    del runner.input_batch.generators[0]
    keep_seeds(runner)
    assert len(runner.step()) == 1


def test_failed_books_leave_every_generator_in_its_place() -> None:
    runner: Any = FakeRunner("cpu", [True, False])

    def fake_failure() -> None:
        raise ValueError("no books")

    runner._bookkeeping_sync = fake_failure
    keep_seeds(runner)
    with pytest.raises(ValueError, match="no books"):
        runner._bookkeeping_sync()
    assert set(runner.input_batch.generators) == {0, 1}


def test_a_gpus_runner_is_left_alone() -> None:
    runner: Any = FakeRunner("meta", [True])
    before = dict(vars(runner))
    keep_seeds(runner)
    assert vars(runner) == before
