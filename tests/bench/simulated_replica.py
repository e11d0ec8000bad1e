"""A replica that computes nothing and takes the time an engine would: for the simulator.

In the way of vLLM V1's scheduler: continuous batching with chunked prefill. Each step first decodes a token
of every sequence that is past its prompt, then fills its token budget with chunks of prompts, first come,
first served. A prompt is taken in when the batch has a place and the KV space can hold all of it. Blocks
nobody uses stay as cache and are evicted least recently used first, the end of a prompt before its beginning.
A hit is whole blocks, and at least the last token is computed. When a decode finds no block, the sequence
that was taken in last loses its own and computes them again later.

With an arena (`simulated_pool`), blocks that the engine's own cache lacks are loaded from there, one request
after the other, while the engine computes others; what it has computed is stored there at the step's end.

What differs: blocks are the trace's, 512 tokens; generated tokens take space, but no later prompt hits them
(a trace does not name them); sampling, networks and tokenizers take no time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from router.fleet import LoadReport
from tests.bench.simulated_cache import Keys, SimulatedCache
from tests.bench.simulated_pool import SimulatedArena
from tests.bench.traces import BLOCK, Trace
from workers.speed import StepSpeed

_SPEED_EVERY = 16  # steps between two measurements of the speed that is reported


@dataclass(frozen=True)
class Speed:
    """How long a step takes, and what fits. Of the order of an 8B model (bf16, 8 KV heads) on one H100-class
    GPU: 16 GB of weights read in 5 ms, 25k prompt tokens a second, attention as costly as the matmuls at 30k
    tokens of context (4*layers*hidden*context against 2*parameters FLOPs), 131 kB of KV per token. Nothing
    of it was measured here.

        step ms = base + token*p + pair * sum of u*(c + u/2) + sequence*n + context*C

    for p prompt tokens in chunks of u tokens after c, and n decoding sequences with C tokens of context.
    """

    base_ms: float = 8.0
    token_ms: float = 0.04
    pair_ms: float = 1.3e-6
    sequence_ms: float = 0.02
    context_ms: float = 4e-5
    max_batch_tokens: int = 8192
    max_sequences: int = 256
    kv_tokens: int = 400_000

    def times(self, factor: float) -> Speed:
        """A replica that takes `factor` times as long."""
        return replace(
            self, base_ms=self.base_ms * factor, token_ms=self.token_ms * factor,
            pair_ms=self.pair_ms * factor, sequence_ms=self.sequence_ms * factor,
            context_ms=self.context_ms * factor,
        )  # fmt: skip

    def requests_per_s(self, trace: Trace) -> float:
        """How many requests like the trace's one replica serves, nothing ever being cached: load 1.

        Each costs its prefill, and its share of decode steps that run as many sequences as fit in the KV
        space. Hits make true capacity larger.
        """
        n, out = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
        prefill = self.token_ms * n + self.pair_ms * n * n / 2 + self.base_ms * n / self.max_batch_tokens
        held = float((out * (n + out / 2)).sum() / out.sum())
        batch = max(min(self.max_sequences, self.kv_tokens / held), 1.0)
        decode = out * (self.base_ms / batch + self.sequence_ms + self.context_ms * held)
        return 1e3 / float((prefill + decode).mean())


class Job:
    """One request at one replica."""

    __slots__ = (
        "asked", "blocks", "cached", "computed", "ended_at", "first_at", "joined", "keys", "loaded", "number",
        "output", "pooled", "produced", "prompt", "registered", "shown", "started", "submitted", "target",
    )  # fmt: skip

    def __init__(self, number: int, keys: Keys, prompt: int, output: int) -> None:
        self.number = number
        self.keys: list[int] = keys.tolist()
        self.prompt, self.output = prompt, output
        self.target = prompt  # tokens to compute before it generates
        self.computed = 0
        self.produced = 0  # tokens
        self.joined = 0  # the replica's step count when it began to decode as it does
        self.registered = 0  # blocks of the prompt that it holds by key
        self.blocks = 0  # further ones
        self.shown = 0  # leading blocks last seen resident
        self.cached = -1  # tokens hit when first taken in ...
        self.pooled = 0  # ... of them, from the arena
        self.loaded = 0  # leading blocks, once what is being loaded has come
        self.asked = False  # the arena knows that it is wanted
        self.submitted = self.started = self.first_at = self.ended_at = -1.0


class SimulatedReplica:
    """Virtual time comes in with every call; `wake(at, version)` asks for `step_ended(at, version)`.

    `on_first` and `on_finish` are told of jobs at the end of the step that did it. With an arena, of which a
    block takes `load_ms`, `later(at)` asks for `loads_ended(at)`.
    """

    def __init__(
        self,
        speed: Speed,
        *,
        wake: Callable[[float, int], None],
        on_first: Callable[[Job, float], None],
        on_finish: Callable[[Job, float], None],
        arena: SimulatedArena | None = None,
        load_ms: float = 0.0,
        later: Callable[[float], None] = lambda at: None,
    ) -> None:
        self.speed = speed
        self.arena = arena
        self.loaded_blocks = 0
        self.busy_s = 0.0
        self.jobs = 0
        self.computed_tokens = 0
        self.preemptions = 0
        self._wake, self._on_first, self._on_finish = wake, on_first, on_finish
        self.cache = SimulatedCache(speed.kv_tokens // BLOCK)
        self._load_ms, self._later, self._loads_until = load_ms, later, 0.0
        self._coming: dict[Job, None] = {}  # accepted, and not submitted yet
        self._waiting: deque[Job] = deque()
        self._loading: deque[tuple[float, Job]] = deque()  # when it will have come; has its blocks
        self._named: list[int] = []  # to be stored in the arena when the step ends
        self._running: dict[Job, None] = {}  # in order of being taken in
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # a heap: step at which it needs attention, order
        self._starving: list[Job] = []  # decoding, but without a block for the next token
        self._unanswered: dict[Job, None] = {}
        self._context = 0  # tokens, of those decoding
        self._order = 0
        self._step = 0
        self._version = 0
        self._began = 0.0
        self._ends = math.inf
        self._steps_under_way = 0
        self._chunks: list[tuple[Job, int]] = []
        self._to_tell: list[tuple[Callable[[Job, float], None], Job]] = []
        self._measured = StepSpeed()
        self._measured_at = -_SPEED_EVERY
        self._said = (0.0, 0.0)

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting or self._loading or self._coming)

    def expect(self, job: Job) -> None:
        """A request has been accepted; it is submitted once blocks from elsewhere are there."""
        self._coming[job] = None
        self._unanswered[job] = None

    def loads_ended(self, now: float) -> None:
        """The time that `later` was called for has come."""
        if not self._steps_under_way:
            self._schedule(now)
        elif not self._chunks:
            self._shorten(now)

    def submit(self, job: Job, now: float) -> None:
        """A request has arrived.

        Raises:
            ValueError: it could never fit.
        """
        if -(-(job.prompt + job.output) // BLOCK) > self.cache.capacity:
            raise ValueError(
                f"a request of {job.prompt} + {job.output} tokens cannot fit in a KV space of "
                f"{self.speed.kv_tokens}: take larger replicas or leave it out"
            )
        job.submitted = now
        self.jobs += 1
        self._coming.pop(job, None)
        self._unanswered[job] = None
        self._waiting.append(job)
        if not self._steps_under_way:
            self._schedule(now)
        elif not self._chunks and len(self._waiting) == 1:
            self._shorten(now)

    def step_ended(self, now: float, version: int) -> bool:
        """The steps under way have; false when they were shortened since and this is no news."""
        if version != self._version:
            return False
        steps, decoding = self._steps_under_way, len(self._decoding)
        prompt_tokens = sum(tokens for _, tokens in self._chunks)
        elapsed_s = now - self._began
        self.busy_s += elapsed_s
        self._measured.step(elapsed_s * 1e3 / steps, prompt_tokens, decoding)
        self._step += steps
        self._context += steps * decoding
        self._steps_under_way = 0
        self.cache.publish()
        if self.arena is not None:
            self.arena.store(self._named)
            self._named = []
        while self._decoding and self._decoding[0][0] <= self._step:
            _, _, job = heapq.heappop(self._decoding)
            self._pause(job)
            if job.produced >= job.output:
                self._finish(job, now)
            else:
                self._starving.append(job)
        for job, _ in self._chunks:
            if job.computed == job.target:
                self._produced_first(job, now)
        self._chunks = []
        self._schedule(now)
        # Only now: who is told may submit the next job at once.
        told, self._to_tell = self._to_tell, []
        for tell, job in told:
            tell(job, now)
        return True

    def report(self) -> LoadReport:
        """Its load as of the end of the last step, as `workers.load` gathers it."""
        backlog, pairs = 0, 0.0
        for job in self._unanswered:
            job.shown = self.cache.hits(job.keys, job.shown, published=True)
            if self.arena is not None:
                job.shown = self.arena.hits(job.keys, job.shown)
            left = max(job.prompt - job.shown * BLOCK, 1)
            backlog += left
            pairs += left * (job.prompt - left + left / 2)
        if self._step - self._measured_at >= _SPEED_EVERY:
            self._measured_at = self._step
            self._said = (self._measured.prefill_ms_per_token, self._measured.decode_step_ms)
        waiting = len(self._waiting) + len(self._loading)
        return LoadReport(
            running=len(self._running),
            waiting=waiting,
            sequences=len(self._running) + waiting + len(self._coming),
            prefill_backlog_tokens=backlog,
            prefill_backlog_pairs=pairs,
            kv_usage=1.0 - self.cache.free / self.cache.capacity,
            max_sequences=self.speed.max_sequences,
            max_batch_tokens=self.speed.max_batch_tokens,
            prefill_ms_per_token=self._said[0],
            decode_step_ms=self._said[1],
            pool_load_ms_per_block=self._load_ms if self.loaded_blocks else 0.0,
        )

    # Steps

    def _schedule(self, now: float) -> None:
        """Begin the next step, or as many as will pass without anything to decide."""
        preempted = self._feed_starving()
        speed, decoding = self.speed, len(self._decoding)
        budget = speed.max_batch_tokens - decoding
        pairs, prompt_tokens = 0.0, 0
        for job in self._prefilling:
            if budget <= 0:
                break
            tokens = min(job.target - job.computed, budget)
            pairs += self._compute(job, tokens)
            budget -= tokens
            prompt_tokens += tokens
        while budget > 0 and not preempted and len(self._running) < speed.max_sequences:
            if self._loading and self._loading[0][0] <= now:
                _, job = self._loading.popleft()
                self._loads_ended(job, now)
            elif self._waiting and self._take_in(self._waiting[0], now):
                job = self._waiting.popleft()
                if job.loaded > job.registered:
                    continue  # others go on meanwhile
            else:
                break
            tokens = min(job.target - job.computed, budget)
            pairs += self._compute(job, tokens)
            budget -= tokens
            prompt_tokens += tokens
        self._prefilling = [job for job in self._prefilling if job.computed < job.target]
        self.computed_tokens += prompt_tokens
        if not prompt_tokens and not decoding:
            assert not self._running, "sequences run, but none can go on"
            return
        steps = 1 if prompt_tokens or preempted else self._decoding[0][0] - self._step
        self._began, self._steps_under_way = now, steps
        extra = speed.token_ms * prompt_tokens + speed.pair_ms * pairs
        self._ends = now + (extra + self._decode_ms(steps)) / 1e3
        self._version += 1
        self._wake(self._ends, self._version)

    def _decode_ms(self, steps: int) -> float:
        """Of so many steps without prompts; each adds a token to every context."""
        speed, n = self.speed, len(self._decoding)
        each = speed.base_ms + speed.sequence_ms * n + speed.context_ms * self._context
        return steps * each + speed.context_ms * n * steps * (steps - 1) / 2

    def _shorten(self, now: float) -> None:
        """Somebody came: end after the step that is under way."""
        elapsed_ms = (now - self._began) * 1e3
        low, high = 1, self._steps_under_way
        while low < high:
            middle = (low + high) // 2
            if self._decode_ms(middle) >= elapsed_ms:
                high = middle
            else:
                low = middle + 1
        if low < self._steps_under_way:
            self._steps_under_way = low
            self._ends = self._began + self._decode_ms(low) / 1e3
            self._version += 1
            self._wake(max(self._ends, now), self._version)

    # Jobs

    def _take_in(self, job: Job, now: float) -> bool:
        """Let it have its blocks, if they can be had: now, or when those of the arena are loaded."""
        most = (job.target - 1) // BLOCK
        hits = loaded = min(self.cache.hits(job.keys), most)
        if self.arena is not None:
            if not job.asked:
                self.arena.asked(job.keys)
                job.asked = True
            loaded = min(self.arena.hits(job.keys, hits), most)
        needed = -(-job.target // BLOCK) - hits
        if not self.cache.claim(job.keys[:hits], needed):
            return False
        job.registered, job.blocks, job.computed, job.loaded = hits, needed, hits * BLOCK, loaded
        if loaded > hits:
            self._loads_until = max(now, self._loads_until) + (loaded - hits) * self._load_ms / 1e3
            self._loading.append((self._loads_until, job))
            self._later(self._loads_until)
        else:
            self._begin(job, now)
        return True

    def _loads_ended(self, job: Job, now: float) -> None:
        named = job.keys[job.registered : job.loaded]
        self.loaded_blocks += len(named)
        self.cache.name(named)
        if job.cached < 0:
            job.pooled = len(named) * BLOCK
        job.blocks -= len(named)
        job.registered, job.computed = job.loaded, job.loaded * BLOCK
        self._begin(job, now)

    def _begin(self, job: Job, now: float) -> None:
        if job.cached < 0:
            job.cached, job.started = job.computed, now
        self._running[job] = None
        self._prefilling.append(job)

    def _compute(self, job: Job, tokens: int) -> float:
        """Plan a chunk; pairs of tokens that it attends to. Its full blocks can be hit from now on."""
        pairs = tokens * (job.computed + tokens / 2)
        job.computed += tokens
        self._chunks.append((job, tokens))
        full = min(job.computed // BLOCK, len(job.keys))
        named = job.keys[job.registered : full]
        self.cache.name(named)
        if self.arena is not None:
            self._named += named
        job.blocks -= len(named)
        job.registered = max(job.registered, full)
        return pairs

    def _produced_first(self, job: Job, now: float) -> None:
        """Its prompt is computed, which gives a token."""
        job.produced += 1
        if job.first_at < 0:
            job.first_at = now
            del self._unanswered[job]
            self._to_tell.append((self._on_first, job))
        if job.produced >= job.output:
            self._finish(job, now)
        else:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """Let it decode until it is done or has filled its blocks."""
        room = (job.registered + job.blocks) * BLOCK - job.computed
        if room <= 0:
            self._starving.append(job)
            return
        self._order += 1
        job.joined = self._step
        due = self._step + min(job.output - job.produced, room)
        heapq.heappush(self._decoding, (due, self._order, job))
        self._context += job.computed

    def _pause(self, job: Job) -> None:
        """It is not among those decoding any more."""
        done = self._step - job.joined
        job.produced += done
        job.computed += done
        self._context -= job.computed

    def _feed_starving(self) -> bool:
        """A block for each that needs one; true when somebody had to give up theirs."""
        preempted = False
        while self._starving:
            job = self._starving.pop()
            while not self.cache.free:
                victim = next(reversed(self._running))
                self._preempt(victim)
                preempted = True
                if victim is job:
                    break
            else:
                self.cache.claim((), 1)
                job.blocks += 1
                self._decode(job)
        return preempted

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        at = next((at for at, entry in enumerate(self._decoding) if entry[2] is job), None)
        if at is not None:
            del self._decoding[at]
            heapq.heapify(self._decoding)
            self._pause(job)
        if job in self._starving:
            self._starving.remove(job)
        if job in self._prefilling:
            self._prefilling.remove(job)
        self._free(job)
        job.target = job.prompt + job.produced
        self._waiting.appendleft(job)

    def _finish(self, job: Job, now: float) -> None:
        self._free(job)
        job.ended_at = now
        self._to_tell.append((self._on_finish, job))

    def _free(self, job: Job) -> None:
        del self._running[job]
        self.cache.release(job.keys[: job.registered], job.blocks)
        job.registered = job.blocks = job.computed = job.loaded = 0

    def assert_whole(self) -> None:
        """Every block is blank, unused, or somebody's; nothing else is kept when it is idle."""
        self.cache.assert_whole(
            sum(job.blocks for job in [*self._running, *(job for _, job in self._loading)])
        )
        if self.idle:
            assert not self.cache.used, "blocks leaked"
            assert not self._unanswered, "a job leaked"
            assert not self._decoding, "a decoding job leaked"
            assert not self._context, f"a context of {self._context} tokens without sequences"
