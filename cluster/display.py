"""What people see of a cluster: start-up progress, the status table, its JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cluster.http_probe import Readiness
from cluster.pool_view import pool_lines
from protos import admin_pb2

_COLOURS = {"ready": "green", "failed": "red", "draining": "yellow", "stopped": "dim"}
_BAR_WIDTH = 24
_PLAIN_WIDTH = 160
_ALARM = "RANKS DISAGREE"
"""Begins the controller's line about ranks that will wait for each other for ever."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that neither wraps nor colours when its output is a file or a pipe."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


class Steps:
    """The stages of a launch, each a line with the seconds it took."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, doing: str, done: str | None = None) -> Iterator[StepNote]:
        """Show `doing` while the body runs, then `done`; nothing more when the body raises."""
        note, started = StepNote(done or doing), time.monotonic()
        if self.console.is_terminal:
            with self.console.status(doing):
                yield note
        else:
            yield note
        self.console.print(f"[green]✓[/] {note.text} [dim]{time.monotonic() - started:.1f} s[/]")

    @contextmanager
    def bar(self, doing: str) -> Iterator[BarNote]:
        """A progress bar; without a terminal, one line whenever the stage changes."""
        if not self.console.is_terminal:
            yield BarNote(self.console, doing)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield BarNote(self.console, doing, progress)

    def say(self, line: str) -> None:
        """A line that is neither a stage nor an error."""
        self.console.print(line)


class StepNote:
    """Lets a stage say what came out of it."""

    def __init__(self, text: str) -> None:
        self.text = text


class BarNote:
    """Receives `(stage, fraction)` of a long preparation."""

    def __init__(self, console: Console, doing: str, progress: Progress | None = None) -> None:
        self._console, self._doing, self._progress, self._stage = console, doing, progress, ""
        self._task = progress.add_task(doing, total=1.0) if progress else None

    def __call__(self, stage: str, fraction: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self._doing}: {stage}", completed=fraction)
        elif stage != self._stage:
            self._console.print(f"  {self._doing}: {stage}")
        self._stage = stage


class ReplicaProgress:
    """Live view of replicas coming up: one row each on a terminal, else one line a change of state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._seen: dict[str, tuple[str, str]] = {}
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> ReplicaProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: admin_pb2.ClusterStatus) -> None:
        """Show what changed since the last call."""
        elapsed = time.monotonic() - self._started
        for replica in status.replicas:
            state = state_name(replica.state)
            key = (replica.epoch, state)
            if self._seen.get(replica.replica) == key:
                continue
            self._seen[replica.replica] = key
            if self._live is None or state in ("ready", "failed"):
                self._console.print(self._line(replica, elapsed))
        if self._live:
            rows = [self._row(replica) for replica in status.replicas if state_name(replica.state) != "ready"]
            self._live.update(Group(*rows), refresh=True)

    def _line(self, replica: admin_pb2.ReplicaStatus, elapsed: float) -> Text:
        state = state_name(replica.state)
        line = Text.assemble(f"  {replica.replica:<11} ", (f"{state:<8}", _COLOURS.get(state, "cyan")))
        line.append(f" {elapsed:6.1f} s", "dim")
        if replica.state == admin_pb2.FAILED and replica.last_error:
            line.append(f"  {replica.last_error}", "red")
        elif replica.shards:
            line.append(f"  {shards_text(replica)}", "dim")
        return line

    def _row(self, replica: admin_pb2.ReplicaStatus) -> Spinner:
        state = state_name(replica.state)
        text = Text.assemble(f"{replica.replica:<11} ", (f"{state:<8}", _COLOURS.get(state, "cyan")))
        text.append(f" {replica.state_for_s:6.1f} s  {shards_text(replica)}", "dim")
        return Spinner("dots", text=text)


def status_view(status: admin_pb2.ClusterStatus) -> Group:
    """The status page: a heading, a table of replicas, a line a host with a KV pool, a line a router."""
    model = status.model
    parallel = f"TP {status.tensor_parallel_size or 1}" + (
        f" × PP {status.pipeline_parallel_size}" if status.pipeline_parallel_size > 1 else ""
    )
    ready = sum(replica.state == admin_pb2.READY for replica in status.replicas)
    context = f", context {model.max_model_len}" if model.max_model_len else ""
    count = f"{ready}/{len(status.replicas)} replicas ready"
    heading = Text.assemble(
        (status.name, "bold"),
        f": {model.name or 'no model yet'}, {count}, {parallel}{context}",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in (
        "replica",
        "epoch",
        "state",
        "for",
        "shards",
        "KV used",
        "run/wait",
        "prefix hits",
        "restarts",
    ):
        table.add_column(
            column, justify="right" if column in ("for", "KV used", "run/wait", "restarts") else "left"
        )
    errors = []
    for replica in status.replicas:
        state, load = state_name(replica.state), replica.load
        known = replica.HasField("load")
        table.add_row(
            replica.replica,
            replica.epoch[:8] or "-",
            Text(state, _COLOURS.get(state, "cyan")),
            duration(replica.state_for_s),
            shards_text(replica) or "-",
            f"{load.kv_usage:.0%}" if known else "-",
            f"{load.running}/{load.waiting}" if known else "-",
            hit_rate(load.prefix_hits_tokens, load.prefix_queries_tokens) if known else "-",
            str(replica.restarts),
        )
        if replica.last_error:
            errors.append(Text.assemble((f"{replica.replica} last error: ", "red"), replica.last_error))
    routers = [
        Text(f"{router.name}: {router.address}  pid {router.pid}" if router.alive else f"{router.name}: down")
        for router in status.routers
    ]
    return Group(heading, table, *_overlap_lines(status), *pool_lines(status), *routers, *errors)


def http_line(address: str, face: Readiness) -> Text:
    """`http: http://127.0.0.1:8000  ready`, or what it is doing instead."""
    what = Text("ready", "green") if face.ready else Text(face.phase or "does not answer", "red")
    return Text.assemble("http: ", address, "  ", what)


def viewer_line(url: str, alive: bool) -> Text:
    """`viewer: http://127.0.0.1:4320`, and whether it answers."""
    return Text.assemble("viewer: ", url, "  ", ("answers", "green") if alive else ("does not answer", "red"))


def status_json(
    status: admin_pb2.ClusterStatus,
    routing: Mapping[str, admin_pb2.RouterState | str] | None = None,
    http: tuple[str, Readiness] | None = None,
    viewer: tuple[str, bool] | None = None,
) -> str:
    """Every field of the status, by its proto name; numbers as numbers.

    `routing` comes by router; `http` is the address of the HTTP face and how it is, `viewer` the URL of the
    page and whether it answers.
    """
    plain = to_plain(status)
    if routing is not None:
        plain["routing"] = {
            name: {"error": state} if isinstance(state, str) else to_plain(state)
            for name, state in routing.items()
        }
    if http is not None:
        plain["http"] = {"address": http[0], "ready": http[1].ready, "phase": http[1].phase}
    if viewer is not None:
        plain["viewer"] = {"url": viewer[0], "alive": viewer[1]}
    return json.dumps(plain, indent=2)


def to_plain(message: Message) -> Any:
    """A message as plain values. Unlike proto JSON, 64-bit integers are numbers: ours stay below 2**53."""
    plain = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(message, plain)


def shards_text(replica: admin_pb2.ReplicaStatus) -> str:
    """`0: 127.0.0.1 core 0 pid 4711 (shm)`, ranks separated by `; `."""
    return "; ".join(_shard_text(shard) for shard in replica.shards)


def state_name(state: admin_pb2.ReplicaState.ValueType) -> str:
    """`ready` for READY."""
    return admin_pb2.ReplicaState.Name(state).lower()


def hit_rate(hits: int, queries: int) -> str:
    """Share of prompt tokens found in the prefix cache, with the counts behind it."""
    return f"{hits / queries:.0%} ({hits}/{queries})" if queries else "-"


def duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _overlap_lines(status: admin_pb2.ClusterStatus) -> list[Text]:
    """One line for all replicas of the same mind, which is one line in all as a rule."""
    minds: dict[str, list[str]] = {}
    for replica in status.replicas:
        if replica.overlap:
            minds.setdefault(replica.overlap, []).append(replica.replica)
    return [
        Text.assemble(
            "overlap" if len(minds) == 1 else f"overlap of {', '.join(replicas)}",
            ": ",
            (mind, "bold red" if mind.startswith(_ALARM) else ""),
        )
        for mind, replicas in minds.items()
    ]


def _shard_text(shard: admin_pb2.ShardStatus) -> str:
    where = (
        f"GPU {_ranges(shard.gpus)}" if shard.gpus else f"core {_ranges(shard.cores)}" if shard.cores else ""
    )
    parts = [f"{shard.rank}: {shard.node}", where, f"pid {shard.pid}" if shard.pid else ""]
    if shard.collective not in ("", "none"):
        parts.append(f"({shard.collective})")
    if shard.pid and not shard.alive:
        parts.append("DEAD")
    return " ".join(filter(None, parts))


def _ranges(numbers: Any) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _with_numbers(message: Message, plain: dict[str, Any]) -> dict[str, Any]:
    wide = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    for field in message.DESCRIPTOR.fields:
        value = plain.get(field.name)
        if value is None:
            continue
        held = getattr(message, field.name)
        if field.cpp_type in wide:
            plain[field.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None and isinstance(value, list):
            plain[field.name] = [_with_numbers(m, v) for m, v in zip(held, value, strict=True)]
        elif field.message_type is not None and isinstance(held, Message) and isinstance(value, dict):
            plain[field.name] = _with_numbers(held, value)
    return plain
