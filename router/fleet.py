"""The replicas of one model as columns, so that a decision is a few array operations. Pure.

A replica's engine has a row from `join` to `leave`; rows are reused. Everything that changes a column is told
when it happens: a report of the replica, a lease of this router, an outcome. Nothing is computed per replica
when a request comes.

Load between reports. A router sees its own leases at once, those of other routers only in the next report. It
assumes that they do as it does: each lease taken or given back since the report stands for as many as there
are routers (`router.picker.routers_seen`). Routers that forget the others all send to the replica that was
emptiest when they last looked: Mitzenmacher, "How Useful Is Old Information?", 2000.

Backlog between reports. Prompts are computed meanwhile, so the backlog is a fluid queue, of time: that of the
tokens and of their pairs (`router.cost.attention_pairs`), without which a long prompt would seem to be over
long before it is. Time takes from it until nothing is left. It is also never above what the leases say,
which a first token or a cancelled request corrects at once: the lesser of both holds.

It is kept in tokens and pairs, not in ms. Those are counted and stay what they are; a and b are estimates
that change with every few outcomes, and each lease would have to be given back at the speed of its day. Time
takes the same share of both, though engines compute prompt by prompt: their sum in ms is right, which is what
a request waits for; which prompts are done is known when their first tokens come.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.cost import CostSettings, Floats, Ints, RowLoad
from router.index import BlockIndex
from router.inflight import InflightPrompts
from router.leases import LeasedLoad
from router.picker import routers_seen
from router.pool import Pools, Share
from router.speeds import Outcome, Speeds

_UNREPORTED_S = 0.05  # a lease this young may not be in a report that comes now
_MOST = 1e12  # of any count that a replica reports ...
_MOST_PAIRS = 1e18  # ... but pairs
_SOME_MS = 1e-15  # in place of 0, to divide by
_ANSWER_TOKENS = 343.0  # mean answer of the Mooncake conversation trace, until answers have been seen
_ANSWER_RATE = 0.02  # of the moving mean of answers: some hundred requests
_RELAX_S = 5.0

_COLUMNS = (
    "reported_sequences",  # running and waiting, as last reported
    "reported_backlog",  # prompt tokens accepted and not computed, as last reported
    "reported_pairs",  # theirs; here and below, pairs follow their tokens
    "kv_usage",  # 0 .. 1, as last reported
    "max_sequences",  # of one engine step; infinite while unknown
    "max_batch_tokens",  # of one engine step; infinite while unknown
    "decode_step_ms",  # of steps without prefill, as last reported; 0 unknown
    "leased_sequences",  # by this router, now
    "leased_prefill",  # prompt tokens, by this router, now
    "leased_pairs",
    "leased_decode",  # tokens to generate, by this router, when a lease last changed
    "leased_sequences_at_report",
    "leased_prefill_at_report",
    "leased_pairs_at_report",
    "backlog",  # prompt tokens, estimated over all routers at `backlog_at`
    "backlog_pairs",
    "backlog_at",  # s
    "young_prefill",  # prompt tokens leased of late, at `young_at`: older ones fade over `_UNREPORTED_S`
    "young_pairs",
    "young_at",  # s
    "t0",  # ms; this and the following: `router.speeds.Coefficients`
    "a",
    "b",
    "d",
    "overhead",
)
_AT = {name: place for place, name in enumerate(_COLUMNS)}
(
    _REP_SEQ, _REP_BACKLOG, _, _KV, _MAX_SEQ, _MAX_TOKENS, _STEP, _SEQ, _PREFILL, _PREFILL_PAIRS, _DECODE,
    _SEQ_THEN, _PREFILL_THEN, _, _BACKLOG, _BACKLOG_PAIRS, _BACKLOG_AT, _YOUNG, _YOUNG_PAIRS, _YOUNG_AT,
    _T0, _A, _B, _D, _OVERHEAD,
) = range(len(_COLUMNS))  # fmt: skip
# Tokens and their pairs together, arrays [2, ...].
_REPORTED, _LEASED, _LEASED_THEN, _LEFT, _YOUNG_BOTH = (
    slice(at, at + 2) for at in (_REP_BACKLOG, _PREFILL, _PREFILL_THEN, _BACKLOG, _YOUNG)
)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica says of its load, as it came: `Fleet.report` makes sense of nonsense."""

    running: float = 0
    waiting: float = 0
    sequences: float = 0
    prefill_backlog_tokens: float = 0
    prefill_backlog_pairs: float = 0
    kv_usage: float = 0
    max_sequences: float = 0
    max_batch_tokens: float = 0
    prefill_ms_per_token: float = 0
    decode_step_ms: float = 0
    pool_load_ms_per_block: float = 0


@dataclass(frozen=True, slots=True)
class Member:
    """Who has a row, and whether it may be picked."""

    replica: str
    epoch: str
    usable: bool = False
    suspect: bool = False
    degraded: str = ""

    @property
    def key(self) -> str:
        """`replica@epoch`."""
        return f"{self.replica}@{self.epoch}"


class Fleet:
    """Rows of replicas. Times are seconds of one clock, given as arguments; ms where a name says so.

    `index`, `inflight` and `pools` are by row; feed the index with what a replica says it holds, and use
    `begin` and `end` for prompts in flight, so that no row is reused while one is. `block_size` is in tokens,
    0 unknown.
    """

    def __init__(
        self,
        *,
        speeds: Speeds | None = None,
        index: BlockIndex | None = None,
        settings: CostSettings | None = None,
    ) -> None:
        self.speeds = speeds if speeds is not None else Speeds()
        self.index = index if index is not None else BlockIndex()
        self.inflight = InflightPrompts()
        self.pools = Pools()
        self.settings = settings or CostSettings()
        self.block_size = 0
        self.columns: Floats = np.zeros((len(_COLUMNS), 8))
        self.names = np.zeros(8, np.uint64)  # hash of the replica's name, for rendezvous hashing
        self.members: tuple[Member | None, ...] = ()  # by row; replaced, never changed
        self.routers = 1.0  # how many routers like this one seem to share the replicas
        self.answer_tokens = _ANSWER_TOKENS  # mean tokens generated per sequence
        self._rows: dict[str, int] = {}
        self._free: deque[int] = deque()
        self._flights: dict[int, int] = {}  # row by handle
        self._flying: Counter[int] = Counter()  # handles by row
        self._reported = self._own = 0.0
        self._relaxed_at = -math.inf
        self._ready: Ints | None = None
        self._distrusted: Ints | None = None

    # Who is there

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, replica: str, epoch: str) -> int:
        """The row of this engine, a new one unless it has one. It is not usable yet.

        Leases that are already held on it must be told again (`leased`).
        """
        member = Member(replica, epoch)
        found = self._rows.get(member.key)
        if found is not None:
            return found
        row = self._free_row()
        self._rows[member.key] = row
        self.columns[:, row] = 0.0
        self.columns[_MAX_SEQ : _MAX_TOKENS + 1, row] = math.inf
        self.names[row] = name_hash(replica)
        self._set_member(row, member)
        self._take_speed(row, replica)
        return row

    def leave(self, row: int) -> None:
        """The engine is gone: its blocks, load and row are forgotten; what is known of its speed stays."""
        member = self._member(row)
        del self._rows[member.key]
        self.index.clear(row)
        self.pools.share(row, None)
        self._forget_report(row)
        self.columns[:, row] = 0.0
        self._set_member(row, None)
        if not self._flying[row]:
            self._free.append(row)

    def row(self, key: str) -> int | None:
        """The row of `replica@epoch`."""
        return self._rows.get(key)

    def set_standing(self, row: int, *, usable: bool, suspect: bool = False, degraded: str = "") -> None:
        """Whether it may be picked, only when nothing better can (`suspect`), and with cache credit.

        `degraded` says why its blocks are not to be trusted, or why it is not usable; it gets no cache credit
        then. Nor does a suspect one.
        """
        member = self._member(row)
        standing = Member(member.replica, member.epoch, usable, suspect, degraded)
        if standing != member:
            self._set_member(row, standing)

    def ready(self) -> Ints:
        """Rows that may be picked: usable and not suspect, or the suspect ones when there is no other."""
        if self._ready is None:
            usable = [(row, m.suspect) for row, m in enumerate(self.members) if m is not None and m.usable]
            sound = [row for row, suspect in usable if not suspect]
            self._ready = np.array(sound or [row for row, _ in usable], np.int64)
        return self._ready

    def distrusted(self) -> Ints:
        """Rows whose blocks get no credit: degraded, suspect, or nobody's."""
        if self._distrusted is None:
            rows = [row for row, m in enumerate(self.members) if m is None or m.suspect or m.degraded]
            self._distrusted = np.array(rows, np.int64)
        return self._distrusted

    def set_pool(self, row: int, share: Share | None) -> None:
        """Which memory of its host the replica shares; None: it shares none."""
        self._member(row)
        self.pools.share(row, share)

    # What happens

    def report(self, row: int, report: LoadReport, now: float) -> None:
        """A replica said how loaded it is. Negative, endless or missing numbers count as 0."""
        member = self._member(row)
        column = self.columns[:, row]
        sequences = max(_count(report.sequences), _count(report.running) + _count(report.waiting))
        backlog = np.array(
            [_count(report.prefill_backlog_tokens), _count(report.prefill_backlog_pairs, _MOST_PAIRS)]
        )
        self._forget_report(row)
        # What was leased a moment ago may still be on its way to the replica: its report says nothing of it.
        unseen = np.zeros(2)
        if now - column[_YOUNG_AT] <= _UNREPORTED_S:
            unseen = np.minimum(column[_YOUNG_BOTH], np.maximum(column[_LEASED] - backlog, 0.0))
        column[_REP_SEQ], column[_REPORTED] = sequences, backlog
        column[_KV] = min(_count(report.kv_usage), 1.0)
        column[_MAX_SEQ] = _count(report.max_sequences) or math.inf
        column[_MAX_TOKENS] = _count(report.max_batch_tokens) or math.inf
        column[_STEP] = _count(report.decode_step_ms)
        self.pools.loads(row, report.pool_load_ms_per_block)
        column[_SEQ_THEN] = column[_SEQ]
        column[_LEASED_THEN] = column[_LEASED] - unseen
        column[_LEFT], column[_BACKLOG_AT] = backlog + unseen, now
        self._reported += sequences
        self._own += min(float(column[_SEQ]), sequences)
        self.routers = routers_seen(self._reported, self._own)
        if self.speeds.measured(member.replica, report.prefill_ms_per_token, report.decode_step_ms):
            self._take_speed(row, member.replica)

    def leased(self, key: str, load: LeasedLoad, now: float) -> None:
        """This router's leases on `key` changed to this; a key without a row is ignored."""
        row = self._rows.get(key)
        if row is None:
            return
        column = self.columns[:, row]
        tokens = load.prefill_tokens - float(column[_PREFILL])
        pairs = max(load.prefill_pairs - float(column[_PREFILL_PAIRS]), 0.0)
        column[_SEQ], column[_DECODE] = load.sequences, load.decode_tokens
        column[_PREFILL], column[_PREFILL_PAIRS] = load.prefill_tokens, load.prefill_pairs
        if tokens <= 0:
            return
        # One by one: of two numbers NumPy is the slower.
        a, b, elapsed_ms = column[_A], column[_B], max(now - column[_BACKLOG_AT], 0.0) * 1e3
        before_ms = a * column[_BACKLOG] + b * column[_BACKLOG_PAIRS]
        kept = max(1.0 - elapsed_ms / (before_ms + _SOME_MS), 0.0)
        column[_BACKLOG] = column[_BACKLOG] * kept + tokens * self.routers
        column[_BACKLOG_PAIRS] = column[_BACKLOG_PAIRS] * kept + pairs * self.routers
        column[_BACKLOG_AT] = now
        young = math.exp(-max(now - column[_YOUNG_AT], 0.0) / _UNREPORTED_S)
        column[_YOUNG] = tokens + column[_YOUNG] * young
        column[_YOUNG_PAIRS] = pairs + column[_YOUNG_PAIRS] * young
        column[_YOUNG_AT] = now

    def begin(self, row: int, key: str, keys: npt.NDArray[np.uint64]) -> int:
        """A prompt with these block keys goes to `key`, decided to be in `row`; the handle is for `end`."""
        member = self.members[row]
        if member is None or member.key != key:  # it left since
            return 0
        handle = self.inflight.add(row, keys)
        self._flights[handle] = row
        self._flying[row] += 1
        return handle

    def end(self, handle: int) -> None:
        """That prompt has been computed, or never will be. Idempotent."""
        row = self._flights.pop(handle, None)
        if row is None:
            return
        self.inflight.discard(handle)
        self._flying[row] -= 1
        if not self._flying[row]:
            del self._flying[row]
            if self.members[row] is None:
                self._free.append(row)

    def learn(self, key: str, outcome: Outcome, now: float) -> None:
        """What a request took on `key`, whether it still has a row or not."""
        replica = key.rpartition("@")[0]
        changed = self.speeds.learn(replica, outcome, now)
        row = self._rows.get(key)
        if changed and row is not None:
            self._take_speed(row, replica)
        generated = outcome.generated_tokens
        if generated is not None and 0 < generated < _MOST:
            self.answer_tokens += (generated - self.answer_tokens) * _ANSWER_RATE

    def relax(self, now: float) -> None:
        """Time passes: doubt what has long not been heard (`router.speeds`). Call it as often as you like."""
        if now - self._relaxed_at < _RELAX_S:
            return
        self._relaxed_at = now
        self.pools.relax()
        rows = [(row, member.replica) for row, member in enumerate(self.members) if member is not None]
        changed = set(self.speeds.relax((replica for _, replica in rows), now))
        for row, replica in rows:
            if replica in changed:
                self._take_speed(row, replica)

    # What follows

    def expected_tokens(self, max_tokens: float) -> float:
        """Tokens that a sequence will probably generate: the mean of recent ones, at most what is allowed."""
        return min(float(max_tokens), self.answer_tokens)

    def load(self, rows: Ints, now: float) -> RowLoad:
        """State and speed of these rows, estimated for `now` over all routers. Arrays [len(rows)]."""
        c = self.columns.take(rows, axis=1)  # unlike [:, rows] with each column in one piece
        leased, a, b = c[_SEQ], c[_A], c[_B]
        sequences = np.maximum(c[_REP_SEQ] + (leased - c[_SEQ_THEN]) * self.routers, leased)
        held = np.maximum(c[_REPORTED] + (c[_LEASED] - c[_LEASED_THEN]) * self.routers, 0.0)
        before_ms = a * c[_BACKLOG] + b * c[_BACKLOG_PAIRS]
        elapsed_ms = np.maximum(now - c[_BACKLOG_AT], 0.0) * 1e3
        kept = np.maximum(1.0 - elapsed_ms / (before_ms + _SOME_MS), 0.0)
        backlog, pairs = np.minimum(c[_LEFT] * kept, held)
        left = c[_DECODE] / np.maximum(leased, 1.0)
        return RowLoad(
            sequences, backlog, pairs, c[_MAX_SEQ], c[_MAX_TOKENS], left, c[_STEP],
            c[_T0], a, b, c[_D], c[_OVERHEAD],
        )  # fmt: skip

    def room(self, now: float) -> npt.NDArray[np.bool_]:
        """By row: whether it may be picked and can take one more sequence without much of a queue.

        That is a predicted queue of at most `replica_queue_ms`, and a free place in the engine's batch.
        """
        found = np.zeros(len(self.members), bool)
        rows = self.ready()
        if len(rows):
            load = self.load(rows, now)
            short = load.backlog_ms() <= self.settings.replica_queue_ms
            found[rows] = short & (load.sequences < load.max_sequences)
        return found

    def saturated(self, now: float) -> bool:
        """Whether no replica has room; true as well when none may be picked."""
        return not bool(self.room(now).any())

    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that the replicas which may be picked compute together; 0 when there are none."""
        return float((1e3 / self.columns[_A, self.ready()]).sum())

    def column(self, name: str) -> Floats:
        """One column, by row; names and units are those of `_COLUMNS`. A view, not to be written to."""
        view: Floats = self.columns[_AT[name]]
        return view

    def _member(self, row: int) -> Member:
        member = self.members[row] if 0 <= row < len(self.members) else None
        if member is None:
            raise KeyError(f"no replica has row {row}: it never joined, or it has left")
        return member

    def _set_member(self, row: int, member: Member | None) -> None:
        members = list(self.members)
        members[row] = member
        self.members = tuple(members)
        self._ready = self._distrusted = None

    def _free_row(self) -> int:
        if self._free:
            return self._free.popleft()
        row = len(self.members)
        self.members = (*self.members, None)
        if row == self.columns.shape[1]:
            self.columns = np.concatenate([self.columns, np.zeros_like(self.columns)], axis=1)
            self.names = np.concatenate([self.names, np.zeros_like(self.names)])
        return row

    def _take_speed(self, row: int, replica: str) -> None:
        speed = self.speeds.of(replica)
        column = self.columns[:, row]
        column[_T0], column[_A], column[_B], column[_D] = speed.t0, max(speed.a, 1e-6), speed.b, speed.d
        column[_OVERHEAD] = speed.overhead

    def _forget_report(self, row: int) -> None:
        column = self.columns[:, row]
        self._reported -= float(column[_REP_SEQ])
        self._own -= min(float(column[_SEQ_THEN]), float(column[_REP_SEQ]))
        self.routers = routers_seen(self._reported, self._own)


def name_hash(text: str) -> int:
    """64 bits of a name, the same in every router."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _count(value: float, most: float = _MOST) -> float:
    return min(float(value), most) if value > 0 else 0.0  # NaN is not > 0
