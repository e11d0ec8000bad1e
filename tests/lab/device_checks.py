"""Right results and safe memory of the overlap's streams, and that these checks can fail."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tests.lab.device_model import (
    Blocking,
    DeafChannel,
    Layer,
    Machine,
    Model,
    Shape,
    add_peer,
    random_inputs,
    random_layers,
)
from workers.overlap import decoder as decoders
from workers.overlap.channel import StreamChannel

Results = dict[str, Any]
COUNTS = (2, 3, 4, 6, 8)


class CheckError(Exception):
    """What was expected and what was found."""


def expect(condition: bool, otherwise: str) -> None:
    """Raises CheckError."""
    if not condition:
        raise CheckError(otherwise)


@dataclass(frozen=True)
class Trial:
    """A pass of a random size."""

    seed: int
    tokens: int
    chunks: int

    @classmethod
    def of(cls, seed: int, machine: Machine) -> Trial:
        chance = random.Random(seed)
        chunks = chance.choice(COUNTS)
        return cls(seed, chance.randint(64, 2048) if machine.real else chance.randint(2 * chunks, 40), chunks)

    def inputs(self, machine: Machine, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        return random_inputs(shape, self.tokens, machine.name, self.seed)

    def on_one_stream(self, layers: list[Layer], machine: Machine, shape: Shape, chunks: int) -> torch.Tensor:
        return decoders.run(Model(layers), Blocking(add_peer), *self.inputs(machine, shape), chunks)

    def delayed(
        self, layers: list[Layer], machine: Machine, shape: Shape, kind: type[StreamChannel], stream: Any
    ) -> torch.Tensor:
        """With parts of layers and sums that begin late at random, and sums that end late."""
        chance = random.Random(self.seed)

        def sometimes() -> None:
            if chance.random() < 0.4:
                machine.sleep(chance.choice((20e-6, 100e-6, 300e-6)))

        def collective(tensor: torch.Tensor) -> None:
            sometimes()
            add_peer(tensor)
            sometimes()

        channel = kind(collective, stream, machine.device)
        inputs = self.inputs(machine, shape)
        with machine.launching():
            result = decoders.run(Model(layers, sometimes), channel, *inputs, self.chunks)
        machine.synchronize()
        return result


def right_results(machine: Machine, shape: Shape, trials: int) -> Results:
    """With delays on both streams, a pass gives what the same chunks give on one stream, bit by bit."""
    layers = random_layers(shape, machine.name)
    different, equal_to_whole, furthest = [], 0, 0.0
    for seed in range(trials):
        on, trial = machine.seeded(seed), Trial.of(seed, machine)
        got = trial.delayed(layers, on, shape, StreamChannel, on.new_stream())
        want = trial.on_one_stream(layers, on, shape, trial.chunks)
        if not torch.equal(got, want):
            different.append(f"{trial} by {_apart(got, want):.3g}")
        whole = trial.on_one_stream(layers, on, shape, 1)
        equal_to_whole += torch.equal(got, whole)
        furthest = max(furthest, _apart(got, whole))
    expect(
        not different,
        f"{len(different)} of {trials} differ from the same chunks on one stream: {different[:5]}",
    )
    return {
        "trials": trials,
        "equal_to_one_stream": trials,
        "equal_to_unchunked": equal_to_whole,
        "furthest_from_unchunked": furthest,
    }


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference by the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def wrong_channels_are_noticed(machine: Machine, shape: Shape, trials: int) -> Results:
    """With either of the two waits left out, that comparison fails."""
    layers = random_layers(shape, machine.name)
    noticed = {"computation does not wait": 0, "channel does not wait": 0}
    for seed in range(trials):
        trial = Trial.of(seed, machine)
        want = trial.on_one_stream(layers, machine, shape, trial.chunks)
        for name in noticed:
            on = machine.seeded(seed)
            right = name == "channel does not wait"
            kind, stream = (StreamChannel, on.deaf_stream()) if right else (DeafChannel, on.new_stream())
            wrong = True
            with suppress(AssertionError):  # by which the simulation names a race
                wrong = not torch.equal(trial.delayed(layers, on, shape, kind, stream), want)
            noticed[name] += wrong
    for name, count in noticed.items():
        expect(count > 0, f"{name}: not noticed in {trials} trials")
    return {"trials": trials, "noticed": noticed}


def abandoned_memory(machine: Machine) -> Results:
    """A sum that nobody awaits does not write into memory that is somebody else's by then."""

    def late(tensor: torch.Tensor) -> None:
        machine.sleep(5e-3)
        tensor.add_(1.0)

    spoilt = {}
    for kind in (StreamChannel, Careless):
        channel = kind(late, machine.new_stream(), machine.device)
        torch.cuda.empty_cache()
        held = torch.zeros(16 << 20, device="cuda")
        torch.cuda.synchronize()
        channel.all_reduce(held)
        del held
        fresh = torch.zeros(16 << 20, device="cuda")
        torch.cuda.synchronize()
        spoilt[kind.__name__] = bool(fresh.any().item())
        del fresh
    expect(not spoilt["StreamChannel"], "an abandoned sum wrote into memory that had been given away")
    expect(spoilt["Careless"], "an unguarded abandoned sum wrote nowhere, so this check proves nothing")
    return {"spoilt": spoilt}


class Careless(StreamChannel):
    """Leaves the memory of abandoned sums to luck."""

    def abandon(self, tensor: torch.Tensor) -> None:
        pass
