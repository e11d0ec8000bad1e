"""Seeded sampling on CPU of a request whose prompt takes more than one step.

The sampler draws for every request of a step, also for one whose prompt is not complete yet and of whom no
token is kept. vLLM 0.32 takes that draw back by moving the generator's offset, which only a GPU's generator
has; on CPU its engine dies of it, and every request with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def keep_seeds(runner: Any) -> None:
    """Have this model runner of vLLM put the generator's state back instead; one on a GPU is left alone."""
    if runner.device.type != "cpu":
        return
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def unfinished() -> dict[int, torch.Generator]:
        """Generators, by place in the batch, of the requests whose prompt this step does not complete."""
        batch = runner.input_batch
        (places,) = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])
        return {
            int(place): batch.generators[int(place)] for place in places if int(place) in batch.generators
        }

    def sample_and_put_back(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in unfinished().values()]
        sampled = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return sampled

    def keep_books_without_them(*args: Any, **kwargs: Any) -> Any:
        generators, apart = runner.input_batch.generators, unfinished()
        for place in apart:
            del generators[place]
        try:
            return keep_books(*args, **kwargs)
        finally:
            generators.update(apart)

    runner._sample = sample_and_put_back
    runner._bookkeeping_sync = keep_books_without_them
