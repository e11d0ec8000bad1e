"""What `kvorum demo` shows once the cluster is up: two clients, streams, a prefix before and after."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.connect import Target, as_command_error
from cluster.reply import Reply
from protos.errors import KvorumError

_MAX_TOKENS = 48
_TIMEOUT_S = 180.0
_REFRESH_PER_S = 10
_PANEL_CHARS = 600
_LINE_CHARS = 90
_PREFIX_TOKENS = 1000
"""Long enough that computing it is felt, short enough for a small context."""

_RULES = (
    "A replica keeps the blocks of a prompt, so that the next prompt that begins alike is cheap.",
    "A request takes a lease on the replica that serves it and gives it back at its end.",
    "Tokens travel over gRPC and never through the control plane.",
    "A shard that dies ends its replica, and the controller starts a fresh epoch.",
    "Blocks that no request needs any more stay until their room is needed.",
)
_QUESTIONS = (
    ("A", "Write two sentences about the sea."),
    ("B", "Name three colours and what they stand for."),
)
_ABOUT_THE_MANUAL = (
    (("A", "What does the manual say about leases?"), ("B", "What happens when a shard dies?")),
    (("A", "Through what do tokens travel?"), ("B", "How long do unused blocks stay?")),
)


@dataclass
class Exchange:
    """One request of the demo and how it ended."""

    lane: str
    question: str
    reply: Reply = field(default_factory=Reply)
    error: str = ""


class View(Protocol):
    """Shows exchanges while they run."""

    def started(self, exchange: Exchange) -> None: ...
    def added(self, exchange: Exchange, text: str) -> None: ...
    def ended(self, exchange: Exchange) -> None: ...


async def run_demo(target: Target, console: Console) -> list[Exchange]:
    """Send the demo's requests, show them as they stream, then a summary; returns all of them.

    Round one is two short questions at once; rounds two and three put a long manual before each
    question, so that the second time each client's prefix can come from a cache.
    """
    done: list[Exchange] = []
    with _view(console) as view:
        async with target.client() as first, target.client() as second:
            clients = {"A": first, "B": second}
            manual = await _manual(first)
            for system, round_ in ((None, _QUESTIONS), *((manual, pair) for pair in _ABOUT_THE_MANUAL)):
                exchanges = [Exchange(lane, question) for lane, question in round_]
                await asyncio.gather(*(_exchange(clients[e.lane], e, system, view) for e in exchanges))
                done += exchanges
    console.print(summary(done))
    return done


def summary(exchanges: Sequence[Exchange]) -> Group:
    """A row a request, and below them what the prefix cache saved."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("client", "replica", "prompt", "cached", "TTFT", "tok/s", "tokens", "trace"):
        right = column in ("prompt", "cached", "TTFT", "tok/s", "tokens")
        table.add_column(column, justify="right" if right else "left")
    for exchange in exchanges:
        reply = exchange.reply
        if exchange.error:
            table.add_row(exchange.lane, Text(exchange.error, "red"))
            continue
        table.add_row(
            exchange.lane,
            reply.served.replica,
            str(reply.usage.prompt_tokens),
            str(reply.usage.cached_tokens),
            f"{reply.ttft_s:.2f} s" if reply.ttft_s is not None else "-",
            f"{reply.tokens_per_s:.1f}" if reply.tokens_per_s else "-",
            str(reply.usage.completion_tokens),
            reply.served.trace_id[:12],
        )
    return Group(table, Text(_what_the_cache_saved(exchanges)))


def _what_the_cache_saved(exchanges: Sequence[Exchange]) -> str:
    """Compares prompts with the manual only: the short ones are no match for them."""
    longest = max((e.reply.usage.prompt_tokens for e in exchanges), default=0)
    long = [
        e.reply for e in exchanges if e.reply.ttft_s is not None and 2 * e.reply.usage.prompt_tokens > longest
    ]
    cached = [
        r.ttft_s for r in long if r.ttft_s is not None and 2 * r.usage.cached_tokens > r.usage.prompt_tokens
    ]
    cold = [
        r.ttft_s for r in long if r.ttft_s is not None and 10 * r.usage.cached_tokens < r.usage.prompt_tokens
    ]
    if not cached or not cold:
        return "No pair of a cold and a cached long prompt came about."
    before, after = statistics.mean(cold), statistics.mean(cached)
    return (
        f"Long prompts: first token after {before:.2f} s cold, after {after:.2f} s with the prefix cached: "
        f"{before / after:.1f} times sooner."
    )


async def _exchange(client: object, exchange: Exchange, system: str | None, view: View) -> None:
    from router.client import KvorumClient  # noqa: PLC0415 - with the client itself

    assert isinstance(client, KvorumClient)
    messages = [{"role": "user", "content": exchange.question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    view.started(exchange)
    exchange.reply = Reply()
    try:
        stream = client.generate(
            messages=messages, temperature=0.0, max_tokens=_MAX_TOKENS, timeout=_TIMEOUT_S
        )
        async for message in stream:
            for _index, text in exchange.reply.add(message):
                view.added(exchange, text)
        if not exchange.reply.finish:
            exchange.error = "the stream ended without a finish reason"
    except KvorumError as error:
        exchange.error = str(as_command_error(error))
    view.ended(exchange)


async def _manual(client: object) -> str:
    """A system message of about `_PREFIX_TOKENS`, less where the context is small."""
    from router.client import KvorumClient  # noqa: PLC0415

    assert isinstance(client, KvorumClient)
    paragraph = " ".join(_RULES)
    measured = await client.tokenize(paragraph)
    room = min(_PREFIX_TOKENS, max(measured.max_model_len - 4 * _MAX_TOKENS, 0) // 2)
    count = max(1, room // max(1, len(measured.ids)))
    return "\n".join(f"Section {number + 1}. {paragraph}" for number in range(count))


def _view(console: Console) -> _Panels | _Lines:
    return _Panels(console) if console.is_terminal else _Lines(console)


class _Panels:
    """Two lanes side by side; what has ended scrolls away above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lanes: dict[str, Exchange] = {}
        self._live = Live(
            console=console, refresh_per_second=_REFRESH_PER_S, get_renderable=self._render, transient=True
        )

    def __enter__(self) -> _Panels:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def started(self, exchange: Exchange) -> None:
        self._lanes[exchange.lane] = exchange

    def added(self, exchange: Exchange, text: str) -> None:
        pass  # the panels read the reply itself, ten times a second

    def ended(self, exchange: Exchange) -> None:
        self._console.print(_end_line(exchange))

    def _render(self) -> Columns:
        width = max(20, (self._console.width - 2) // 2)
        panels = [
            Panel(
                Text(exchange.reply.text[-_PANEL_CHARS:]), title=f"{lane}: {exchange.question}", width=width
            )
            for lane, exchange in sorted(self._lanes.items())
        ]
        return Columns(panels)


class _Lines:
    """Whole lines under their lane's name, so that two streams stay readable in one file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[str, str] = {}

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def started(self, exchange: Exchange) -> None:
        self._print(exchange.lane, f"? {exchange.question}")

    def added(self, exchange: Exchange, text: str) -> None:
        pending = self._pending.get(exchange.lane, "") + text
        while "\n" in pending or len(pending) > _LINE_CHARS:
            cut = pending.find("\n") if "\n" in pending else pending.rfind(" ", 1, _LINE_CHARS)
            cut = cut if cut >= 0 else _LINE_CHARS
            self._print(exchange.lane, pending[:cut])
            pending = pending[cut:].lstrip(" ").removeprefix("\n")
        self._pending[exchange.lane] = pending

    def ended(self, exchange: Exchange) -> None:
        if rest := self._pending.pop(exchange.lane, ""):
            self._print(exchange.lane, rest)
        self._console.print(_end_line(exchange))

    def _print(self, lane: str, line: str) -> None:
        self._console.print(Text(f"{lane} │ {line}"))


def _end_line(exchange: Exchange) -> Text:
    if exchange.error:
        return Text(f"{exchange.lane} ✗ {exchange.error}", "red")
    return Text(f"{exchange.lane} ✓ {exchange.reply.line()}", "dim")
