"""What a replica would cost a request: predicted milliseconds, term by term. Pure arrays.

Peers add blocks, counts and scores; such a sum has no unit, and its weights hold for one machine only.
Here every term is a time, so the only weights are two exchange rates that an operator can argue about:
what a millisecond of other requests is worth, and what a session's habit is worth.

Terms, for n prompt tokens of which c need no computing and u = n - c do (n, c, u in tokens):

    queue        = a * backlog + b * its pairs + slot wait    what must be computed before it
    prefill      = t0 + a*u + b*u*(c + u/2)                   its own prompt
    fetch        = max(pull - queue, 0) + load: blocks that come from memory instead of being computed
    interference = ceil((backlog + u) / max_batch_tokens) * d * running
    overhead     = network, event loops, sampling: whatever outcomes have shown beyond the engine's times
    ttft         = the sum of the above
    harm         = weight * ((1 + running) * prefill + running * sequences * T * d)
    affinity     = credit of the session's preferred replica
    score        = ttft + harm - affinity; the least wins

Where replicas share finished blocks there are two ways to serve a prompt on one replica: to compute what its
host lacks, or to have it pulled from another host first (`router.pool`). The one with the least score counts.
Blocks are pulled before the engine has the request, while it computes what is ahead; they are loaded from the
host's memory when the request's turn has come. Neither takes computing, so neither harms anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Exchange rates and thresholds. All are finite and not negative.

    Raises:
        ValueError: one of them is not.
    """

    harm_weight: float = 0.3  # ms of this request's TTFT that one ms of delay to others is worth
    near_tie_ms: float = 1.0  # scores this close are equal ...
    near_tie_percent: float = 3.0  # ... and so are those within this share of the best TTFT
    affinity_ms: float = 20.0  # what the session's preferred replica may be slower
    replica_queue_ms: float = 2000.0  # a replica with more predicted queue takes no further request

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, not {value}")


@dataclass(frozen=True, slots=True, eq=False)
class RowLoad:
    """State and speed of the replicas in question, arrays [n]. Estimated over all routers, for now."""

    sequences: Floats  # running and waiting
    backlog: Floats  # prompt tokens accepted and not computed
    backlog_pairs: Floats  # of the same tokens; see `attention_pairs`
    max_sequences: Floats  # one engine step's; infinite when unknown
    max_batch_tokens: Floats  # one engine step's; infinite when unknown
    tokens_left: Floats  # mean tokens a running sequence has still to generate; 0 unknown
    decode_step_ms: Floats  # of a step without prefill; 0 unknown
    t0: Floats  # ms, fixed cost of a prefill
    a: Floats  # ms per computed token
    b: Floats  # ms per computed token and token of context before it
    d: Floats  # ms that one running sequence adds to a step
    overhead: Floats  # ms

    def running(self) -> Floats:
        """Sequences in the engine's batch: all of them, up to its room."""
        running: Floats = np.minimum(self.sequences, self.max_sequences)
        return running

    def backlog_ms(self) -> Floats:
        """Time to compute all prompts accepted until now: a*tokens + b*pairs. Their t0 are left out."""
        ms: Floats = self.a * self.backlog + self.b * self.backlog_pairs
        return ms


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """What it takes to have blocks that are not computed, ms.

    Arrays [n], or [2, n] where something could be pulled from another host: without that, and with it.
    """

    load: Floats  # [n] or [2, n]: from the memory of the replica's host into the engine
    pull: Floats | None = None  # [n]: from another host into that memory; infinite: not there


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted ms, arrays [n]; see the module for each formula."""

    queue: Floats
    prefill: Floats
    fetch: Floats
    interference: Floats
    overhead: Floats
    ttft: Floats
    harm: Floats
    affinity: Floats
    score: Floats
    running: Floats  # sequences that the prediction took to be decoding
    pulls: Flags | None = None  # whether it is about serving with a pull; None: nowhere


def usable_cached(blocks: npt.NDArray[np.integer], block_size: int, prompt_tokens: int) -> Ints:
    """Tokens that `blocks` leading blocks of a prompt save: all, but whole blocks and never the last token.

    vLLM computes at least the last prompt token, for its logits, and caches whole blocks only
    (`KVCacheManager.get_computed_blocks`: at most the prompt's length - 1, rounded down to blocks).
    """
    if block_size <= 0:
        return np.zeros(blocks.shape, np.int64)
    most = max(prompt_tokens - 1, 0) // block_size
    saved: Ints = np.minimum(blocks, most).astype(np.int64, copy=False) * block_size
    return saved


def queue_ms(load: RowLoad, running: Floats, sequences: float, expected_tokens: float) -> Floats:
    """Time until an engine turns to a request that comes now.

    Prompts ahead of it are computed first (vLLM schedules first come, first served within a priority), each
    at its own cost: tokens alone would count an 85k-token prompt as less than half of the time it takes where
    attention costs as much as the matmuls at 30k.

    When the batch is full, one more sequence waits until one of the running ends. They end at a
    rate of running / (mean tokens left * step time) by Little's law (1961), so w sequences too many
    take w * tokens left * step / running. The mean left over is that of this router's own leases; without
    any, half of what is expected of a whole answer.
    """
    queue = load.backlog_ms()
    excess = load.sequences + sequences - load.max_sequences
    if excess.max() > 0:
        left = np.where(load.tokens_left > 0, load.tokens_left, expected_tokens / 2)
        step = np.where(load.decode_step_ms > 0, load.decode_step_ms, load.t0 + load.d * running)
        queue = queue + np.maximum(excess, 0.0) * left * step / load.max_sequences
    return queue


def attention_pairs(uncached: Amount, cached: Amount) -> Amount:
    """u*(c + u/2), a multiple of a half: pairs of a computed token and one before it.

    In causal attention each of u tokens attends to the c before all of them and, on average, to half of
    the u.
    """
    return uncached * (cached + uncached * 0.5)


def prefill_ms(t0: Floats, a: Floats, b: Floats, uncached: Amount, cached: Amount) -> Floats:
    """t0 + a*u + b*u*(c + u/2): matmuls are linear in computed tokens, attention in `attention_pairs`."""
    ms: Floats = t0 + a * uncached + b * attention_pairs(uncached, cached)
    return ms


def predict(
    load: RowLoad,
    *,
    prompt_tokens: int,
    cached: Ints,
    sequences: int,
    expected_tokens: float,
    affinity: Floats,
    settings: CostSettings,
    fetch: Fetch | None = None,
) -> Prediction:
    """The cost of one request on each replica.

    `cached` [n] counts tokens that need no computing when the request's turn comes: resident ones, and those
    of a prompt in flight there, whose remaining computation is in the backlog and so in the queue term. What
    is fetched counts as well; where a pull is possible it is [2, n], without and with one.
    `expected_tokens` is T, what each of its sequences will probably generate.

    Harm is what others pay. While a prompt is computed, the steps that `running` decodes share with it
    are longer by its time: running * prefill ms. Then its own sequences are in every step, d each, for
    T steps, for everyone that runs. And the engine's time is taken from whoever comes next: the 1 in
    (1 + running). That last part is why a sibling that could as soon be served by waiting for the same
    prefix elsewhere in flight as by computing it anew, joins: equal TTFT, but a second copy of the work.
    It is a preference of harm_weight times the prefix's prefill time and no more: a longer wait than
    that spills.
    """
    known = cached.astype(np.float64)
    uncached = prompt_tokens - known
    running = load.running()
    queue = queue_ms(load, running, sequences, expected_tokens)
    prefill = prefill_ms(load.t0, load.a, load.b, uncached, known)
    steps = np.maximum(np.ceil((load.backlog + uncached) / load.max_batch_tokens), 1.0)
    slowed = load.d * running
    interference = steps * slowed
    harm = settings.harm_weight * ((1.0 + running) * prefill + slowed * (sequences * expected_tokens))
    fetched = np.zeros(len(queue)) if fetch is None else fetch.load
    pull = None if fetch is None else fetch.pull
    if pull is not None:
        fetched = fetched.copy()
        fetched[1] += np.maximum(pull - queue, 0.0)
    ttft = queue + prefill + fetched + interference + load.overhead
    score = ttft + harm - affinity
    if pull is None:
        return Prediction(
            queue, prefill, fetched, interference, load.overhead, ttft, harm, affinity, score, running
        )
    pulls = score[1] < score[0]

    def best(term: Floats) -> Floats:
        return np.where(pulls, term[1], term[0])

    return Prediction(
        queue, best(prefill), best(fetched), best(interference), load.overhead, best(ttft),
        best(harm), affinity, best(score), running, pulls,
    )  # fmt: skip
