"""Requests to replay: a trace in Mooncake's format, or a generated one of the same shape.

Mooncake's format (FAST'25) is JSON, one object a line: `timestamp` (ms), `input_length`, `output_length`
(tokens), `hash_ids` (one id per 512-token block of the prompt, the last one may be partial; equal ids mean
equal prefixes up to and with that block). What a request generated has no id: a next turn's ids begin to
differ in the block where the prompt before it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protos import blockkeys

BLOCK = 512  # tokens of one id

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, as columns."""

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    sessions: Ints  # who asks; -1 unknown
    keys: blockkeys.Keys  # of all prompts' full blocks, one after the other
    starts: Ints  # [requests + 1]: where each one's keys begin

    def __len__(self) -> int:
        return len(self.arrival_s)

    def keys_of(self, at: int) -> blockkeys.Keys:
        """Of the full blocks of one prompt."""
        return self.keys[self.starts[at] : self.starts[at + 1]]

    def first(self, requests: int) -> Trace:
        """The trace's first so many requests."""
        if requests >= len(self):
            return self
        return Trace(
            self.name, self.arrival_s[:requests], self.input_tokens[:requests],
            self.output_tokens[:requests], self.sessions[:requests], self.keys,
            self.starts[: requests + 1],
        )  # fmt: skip

    def most_hits(self) -> float:
        """Share of prompt tokens that one endless cache would have, all requests in order of arrival."""
        seen: set[int] = set()
        hits = 0
        for at, tokens in enumerate(self.input_tokens.tolist()):
            keys = self.keys_of(at).tolist()
            known = next((depth for depth, key in enumerate(keys) if key not in seen), len(keys))
            hits += min(known, (tokens - 1) // BLOCK) * BLOCK
            seen.update(keys)
        return hits / float(self.input_tokens.sum())


@dataclass(frozen=True)
class Shape:
    """Of a generated trace. The defaults are fitted to Mooncake's conversation trace by its quantiles.

    Sessions begin evenly and have a geometric number of turns. Each has one of `system_prompts` (popular
    ones more often: Zipf), a long first message, then turns that repeat everything so far, the answers
    included. Lengths and pauses are lognormal, given by median and sigma. Their trace has one system prompt
    of one block; here there are more and longer ones, as when several products share a fleet.
    """

    requests_per_s: float = 3.3
    more_turns: float = 0.39  # chance of another turn
    pause_s: tuple[float, float] = (123.0, 1.07)
    first_message: tuple[float, float] = (4300.0, 1.35)  # tokens
    later_message: tuple[float, float] = (450.0, 1.9)  # tokens
    answer: tuple[float, float] = (380.0, 180.0)  # mean and deviation, tokens
    short_answers: float = 0.12  # share of answers of about 20 tokens
    longest_answer: int = 2000
    longest_prompt: int = 126_000
    system_prompts: int = 32
    system_blocks: tuple[int, int] = (1, 3)


def read(path: Path) -> Trace:
    """A trace in Mooncake's format.

    Raises:
        ValueError: a line is not such an object; the message has its number.
    """
    arrivals, inputs, outputs, ids = [], [], [], []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                arrivals.append(float(entry["timestamp"]) / 1e3)
                inputs.append(int(entry["input_length"]))
                outputs.append(max(int(entry["output_length"]), 1))
                ids.append([int(each) for each in entry["hash_ids"]])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected timestamp, input_length, output_length and hash_ids: "
                    f"{error!r}"
                ) from error
            if inputs[-1] < 1 or len(ids[-1]) < inputs[-1] // BLOCK:
                raise ValueError(
                    f"{path}, line {number}: {inputs[-1]} prompt tokens with {len(ids[-1])} ids; expected at "
                    f"least one token, and an id for every full block of {BLOCK}"
                )
    if not arrivals:
        raise ValueError(f"{path} has no requests")
    return _trace(
        path.stem, arrivals=arrivals, inputs=inputs, outputs=outputs, sessions=[-1] * len(ids), ids=ids
    )


def generate(requests: int, seed: int, shape: Shape | None = None) -> Trace:
    """A trace of this many requests; the same for the same arguments."""
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    fresh = _counter()
    least, most = shape.system_blocks
    lengths = rng.integers(least, most + 1, shape.system_prompts).tolist()
    systems = [[next(fresh) for _ in range(length)] for length in lengths]
    popularity = 1.0 / np.arange(1, shape.system_prompts + 1)
    popularity /= popularity.sum()
    made: list[tuple[float, int, int, int, list[int]]] = []
    started, session = 0.0, 0
    per_session = shape.requests_per_s * (1.0 - shape.more_turns)
    # Sessions overlap: those that begin after the last request that is kept do not matter.
    while len(made) < requests * 1.3 + 50:
        started += rng.exponential(1.0 / per_session)
        ids = list(systems[rng.choice(shape.system_prompts, p=popularity)])
        tokens = len(ids) * BLOCK + _lognormal(rng, shape.first_message)
        when = started
        while tokens <= shape.longest_prompt:
            ids = ids + [next(fresh) for _ in range(-(-tokens // BLOCK) - len(ids))]
            answer = _answer(rng, shape)
            made.append((when, tokens, answer, session, ids))
            if rng.random() >= shape.more_turns:
                break
            when += rng.lognormal(np.log(shape.pause_s[0]), shape.pause_s[1])
            ids = ids[: tokens // BLOCK]
            tokens += answer + _lognormal(rng, shape.later_message)
        session += 1
    made.sort(key=lambda entry: entry[0])
    arrivals, inputs, outputs, sessions, all_ids = zip(*made[:requests], strict=True)
    return _trace(
        f"generated, seed {seed}",
        arrivals=arrivals,
        inputs=inputs,
        outputs=outputs,
        sessions=sessions,
        ids=all_ids,
    )


def _trace(
    name: str,
    *,
    arrivals: Sequence[float],
    inputs: Sequence[int],
    outputs: Sequence[int],
    sessions: Sequence[int],
    ids: Sequence[Sequence[int]],
) -> Trace:
    """Keys are the router's own, of the chain of ids: each id stands for the tokens of its block."""
    order = np.argsort(np.array(arrivals), kind="stable")
    root = blockkeys.root("trace")
    chains = [
        blockkeys.keys(np.array(ids[at][: inputs[at] // BLOCK], np.int64), 1, root) for at in order.tolist()
    ]
    starts = np.zeros(len(order) + 1, np.int64)
    np.cumsum([len(chain) for chain in chains], out=starts[1:])
    return Trace(
        name,
        np.array(arrivals)[order] - min(arrivals),
        np.array(inputs, np.int64)[order],
        np.array(outputs, np.int64)[order],
        np.array(sessions, np.int64)[order],
        np.concatenate(chains),
        starts,
    )


def _counter() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _lognormal(rng: np.random.Generator, median_sigma: tuple[float, float]) -> int:
    median, sigma = median_sigma
    return max(int(rng.lognormal(np.log(median), sigma)), 1)


def _answer(rng: np.random.Generator, shape: Shape) -> int:
    short = rng.random() < shape.short_answers
    tokens = rng.exponential(20.0) if short else rng.normal(*shape.answer)
    return int(np.clip(tokens, 1, shape.longest_answer))
