"""One trace as a tree: with a timeline for terminals, one line per span for pipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from telemetry.record import StoredSpan, roots
from telemetry.text import printable

_MAX_VALUE_CHARS = 80
_MAX_PIPE_VALUE_CHARS = 2000
_MAX_GUIDE_LEVELS = 16
_MAX_SERVICE_CELLS = 28
_FIRST_ATTRIBUTES = ("error.type", "kvorum.", "gen_ai.")
_NUMBER_CELLS = 10


def render(spans: Sequence[StoredSpan]) -> RenderableType:
    """The spans of one trace as a tree with offsets, durations, a timeline and their attributes.

    Every span is shown: one whose parent was not recorded stands at the top and says so.
    Text from attributes is never interpreted as markup or terminal control.
    """
    return _TraceView(spans)


def render_text(spans: Sequence[StoredSpan]) -> str:
    """The same for pipes: one line per span, no colours, only very long values cut."""
    rows = list(_rows(spans))
    if not rows:
        return "no spans"
    begin_ns = min(row.span.start_ns for row in rows)
    names = [_indent(row.depth) + _label(row) for row in rows]
    services = [_service(row.span) for row in rows]
    name_width, service_width = max(map(len, names)), max(map(len, services))
    lines = [_headline(spans)]
    for row, name, service in zip(rows, names, services, strict=True):
        details = "  ".join(_details(row.span, _MAX_PIPE_VALUE_CHARS))
        lines.append(
            f"{name:<{name_width}}  {service:<{service_width}}"
            f"  {_offset(row.span, begin_ns):>{_NUMBER_CELLS}}  {_duration(row.span):>{_NUMBER_CELLS}}"
            f"  {'ERROR  ' if row.span.is_error else ''}{details}".rstrip()
        )
    return "\n".join(lines)


def with_linked(spans: Sequence[StoredSpan], linked: Iterable[Sequence[StoredSpan]]) -> list[StoredSpan]:
    """One trace and others that it links to, as one tree.

    The topmost spans of a linked trace go below the span that links to it, the first one if several do;
    a trace that nothing links to is left out, and so is the trace itself.
    """
    owners: dict[str, str] = {}
    for span in spans:
        for link in span.links:
            if link.trace_id == span.trace_id:
                continue
            owners.setdefault(link.trace_id, span.span_id)
    found = list(spans)
    for other in linked:
        owner = owners.get(other[0].trace_id) if other else None
        if owner is not None:
            tops = {id(top) for top in roots(other)}
            found += [replace(span, parent_id=owner) if id(span) in tops else span for span in other]
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    """A span in display order. `open_levels` says for each ancestor level whether its line goes on below."""

    span: StoredSpan
    depth: int
    open_levels: tuple[bool, ...]
    is_last: bool
    note: str


def _rows(spans: Sequence[StoredSpan]) -> Iterator[_Row]:
    """Every span once, parents first, siblings by start; iterative, for traces of any depth."""
    children: dict[str | None, list[StoredSpan]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    for siblings in children.values():
        siblings.sort(key=lambda span: (span.start_ns, span.span_id), reverse=True)
    unseen = {id(span): span for span in sorted(spans, key=lambda span: span.start_ns)}
    tops = roots(spans)
    expanded: set[str] = set()
    while unseen:
        # Spans that no root leads to have parents that go in a circle; corrupt, but still shown.
        for top in tops or [next(iter(unseen.values()))]:
            note = "" if top.parent_id is None else f"parent {printable(top.parent_id, 16)} not recorded"
            stack = [_Row(top, 0, (), True, note if tops else "parents go in a circle")]
            while stack:
                row = stack.pop()
                if unseen.pop(id(row.span), None) is None:
                    continue
                yield row
                if row.span.span_id in expanded:
                    continue
                expanded.add(row.span.span_id)
                open_levels = (*row.open_levels, not row.is_last)[-_MAX_GUIDE_LEVELS:] if row.depth else ()
                below = [child for child in children.get(row.span.span_id, ()) if id(child) in unseen]
                # The stack pops the earliest first, so the latest (first here) is drawn last.
                stack += [
                    _Row(child, row.depth + 1, open_levels, at == 0, "") for at, child in enumerate(below)
                ]
        tops = []


class _TraceView:
    """Laid out for the width it is printed at."""

    def __init__(self, spans: Sequence[StoredSpan]) -> None:
        self._spans = spans

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = list(_rows(self._spans))
        if not rows:
            yield Text("no spans")
            return
        yield Text(_headline(self._spans), style="bold")
        begin_ns = min(row.span.start_ns for row in rows)
        extent_ns = max(max(row.span.end_ns for row in rows) - begin_ns, 1)
        guides = [_guide(row, ascii_only=options.ascii_only) for row in rows]
        names = [guide + _label(row) for guide, row in zip(guides, rows, strict=True)]
        service_cells = min(max(cell_len(_service(row.span)) for row in rows), _MAX_SERVICE_CELLS)
        fixed = service_cells + 2 * _NUMBER_CELLS + 8
        bar_cells = min(max((options.max_width - fixed) // 3, 8), 40)
        name_cells = max(min(max(map(cell_len, names)), options.max_width - fixed - bar_cells), 12)
        for row, guide, name in zip(rows, guides, names, strict=True):
            span, style = row.span, "red" if row.span.is_error else ""
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(_fit(name, name_cells), style or "bold")
            line.append("  " + _fit(_service(span), service_cells), "cyan")
            line.append(f"  {_offset(span, begin_ns):>{_NUMBER_CELLS}}", "dim")
            line.append(f"  {_duration(span):>{_NUMBER_CELLS}}  ", style)
            line.append(
                _bar(span, begin_ns, extent_ns, bar_cells, "=" if options.ascii_only else "━"),
                style or "green",
            )
            yield line
            indent = _continued(guide) + "  "
            for text in _packed(_details(span, _MAX_VALUE_CHARS), options.max_width - len(indent)):
                yield Text(indent + text, style=style or "dim", overflow="fold")


def _headline(spans: Sequence[StoredSpan]) -> str:
    begin_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    services = len({(span.service, span.instance) for span in spans})
    errors = sum(span.is_error for span in spans)
    total = f"{len(spans)} spans of {services} services in {_ms(end_ns - begin_ns)}"
    failed = f", {errors} failed" if errors else ""
    return f"trace {printable(spans[0].trace_id, 32)}: {total}{failed}"


def _label(row: _Row) -> str:
    name = printable(row.span.name, 120)
    return f"{name} ({row.note})" if row.note else name


def _service(span: StoredSpan) -> str:
    return " ".join(part for part in (printable(span.service, 60), printable(span.instance, 60)) if part)


def _indent(depth: int) -> str:
    return "  " * min(depth, _MAX_GUIDE_LEVELS)


def _guide(row: _Row, *, ascii_only: bool) -> str:
    if row.depth == 0:
        return ""
    down, last, tee = ("|  ", "`- ", "|- ") if ascii_only else ("│  ", "└─ ", "├─ ")
    return "".join(down if is_open else "   " for is_open in row.open_levels) + (last if row.is_last else tee)


def _continued(guide: str) -> str:
    """The guide of a line that goes on below a span's own line."""
    return guide.replace("├─ ", "│  ").replace("└─ ", "   ").replace("|- ", "|  ").replace("`- ", "   ")


def _bar(span: StoredSpan, begin_ns: int, extent_ns: int, cells: int, mark: str) -> str:
    left = min((span.start_ns - begin_ns) * cells // extent_ns, cells - 1)
    right = min(-(-(span.end_ns - begin_ns) * cells // extent_ns), cells)
    return " " * left + mark * max(right - left, 1)


def _offset(span: StoredSpan, begin_ns: int) -> str:
    return "+" + _ms(span.start_ns - begin_ns)


def _duration(span: StoredSpan) -> str:
    return _ms(span.end_ns - span.start_ns)


def _ms(nanoseconds: int) -> str:
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds / 1e3:.2f} s" if abs(milliseconds) >= 10_000 else f"{milliseconds:.2f} ms"


def _details(span: StoredSpan, value_chars: int) -> list[str]:
    """error message, attributes (ours first), events and links, each as one safe word group."""
    found = [printable(span.status_message, value_chars)] if span.status_message else []
    found += [f"{_short(key)}={_value(value, value_chars)}" for key, value in _ordered(span.attributes)]
    for event in span.events:
        values = "".join(
            f" {_short(key)}={_value(value, value_chars)}" for key, value in event.attributes.items()
        )
        found.append(f"@{_short(event.name)} +{_ms(event.time_ns - span.start_ns)}{values}")
    found += [
        f"-> trace {printable(link.trace_id, 32)} span {printable(link.span_id, 16)}" for link in span.links
    ]
    return found


def _ordered(attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    def rank(item: tuple[str, Any]) -> int:
        return next((at for at, prefix in enumerate(_FIRST_ATTRIBUTES) if item[0].startswith(prefix)), 9)

    return sorted(attributes.items(), key=rank)


def _short(key: str) -> str:
    return printable(key.removeprefix("kvorum.").removeprefix("gen_ai."), 80)


def _value(value: Any, chars: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return printable("[" + ", ".join(_value(item, chars) for item in value[:100]) + "]", chars)
    return printable(str(value), chars)


def _fit(text: str, cells: int) -> str:
    return set_cell_size(text, cells) if cell_len(text) <= cells else set_cell_size(text, cells - 1) + "…"


def _packed(words: Sequence[str], width: int) -> Iterator[str]:
    """Word groups, as many to a line as fit."""
    line = ""
    for word in words:
        if line and cell_len(line) + 2 + cell_len(word) > width:
            yield line
            line = ""
        line = f"{line}  {word}" if line else word
    if line:
        yield line
