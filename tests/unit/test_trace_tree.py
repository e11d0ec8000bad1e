"""A trace on a terminal and in a pipe: every span shown, no text obeyed."""

import io
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from telemetry.record import StoredEvent, StoredLink, StoredSpan
from telemetry.text import printable
from telemetry.tree import render, render_text, with_linked

MS = 1_000_000
BEGIN = 1_700_000_000_000_000_000


def a_span(
    span_id: str,
    parent_id: str | None = None,
    *,
    name: str | None = None,
    at_ms: float = 0,
    ms: float = 10,
    **more: object,
) -> StoredSpan:
    start_ns = BEGIN + int(at_ms * MS)
    more.setdefault("resource", {"service.name": "kvorum.router", "service.instance.id": "r0"})
    return StoredSpan(
        trace_id="ab" * 16,
        span_id=span_id,
        parent_id=parent_id,
        name=name or f"span-{span_id}",
        kind="INTERNAL",
        start_ns=start_ns,
        end_ns=start_ns + int(ms * MS),
        **more,  # type: ignore[arg-type]
    )


REQUEST = [
    a_span("1", name="kvorum.router.request", ms=100),
    a_span("3", "1", name="kvorum.router.forward", at_ms=20, ms=80),
    a_span("2", "1", name="kvorum.router.tokenize", at_ms=1, ms=2),
    a_span(
        "4",
        "3",
        name="kvorum.replica.generate",
        at_ms=25,
        ms=70,
        status="ERROR",
        status_message="the engine died",
        attributes={"server.port": 1, "gen_ai.usage.output_tokens": 12, "error.type": "REPLICA_LOST"},
        events=(StoredEvent("kvorum.first_token", BEGIN + 40 * MS),),
        links=(StoredLink("cd" * 16, "ef" * 8),),
        resource={"service.name": "kvorum.replica", "service.instance.id": "a"},
    ),
]


def on_terminal(spans: list[StoredSpan], width: int = 120, *, color: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None).print(
        render(spans)
    )
    return out.getvalue()


def test_children_stand_below_their_parent_in_order_of_start() -> None:
    shuffled = random.Random(3).sample(REQUEST, len(REQUEST))
    lines = on_terminal(shuffled).splitlines()
    assert lines[0].startswith(f"trace {'ab' * 16}: 4 spans of 2 services in 100.00 ms, 1 failed")
    tree = [line.split("  ")[0] if not line.startswith(" ") else line.split("k")[0] for line in lines[1:4]]
    assert tree == ["kvorum.router.request", "├─ kvorum.router.tokenize", "└─ kvorum.router.forward"]
    assert lines[4].startswith("   └─ kvorum.replica.generate")
    assert "kvorum.replica a" in lines[4]
    assert "+25.00 ms" in lines[4]
    assert "70.00 ms" in lines[4]


def test_details_put_the_error_first_and_include_events_and_links() -> None:
    text = on_terminal(REQUEST, width=200)
    detail = next(line for line in text.splitlines() if "the engine died" in line)
    order = [
        "the engine died",
        "error.type=REPLICA_LOST",
        "usage.output_tokens=12",
        "server.port=1",
        "@first_token +15.00 ms",
    ]
    assert [detail.index(part) for part in order] == sorted(detail.index(part) for part in order)
    assert f"-> trace {'cd' * 16} span {'ef' * 8}" in text


def test_failed_spans_are_red_and_others_are_not() -> None:
    lines = on_terminal(REQUEST, color=True).splitlines()
    red = "\x1b[31m"
    assert [red in line for line in lines[1:5]] == [False, False, False, True]


def test_the_timeline_shows_where_in_the_trace_a_span_lies() -> None:
    lines = on_terminal([a_span("1", ms=100), a_span("2", "1", at_ms=50, ms=50)], width=120).splitlines()
    whole, half = (line[line.rindex(" ms") + 5 :] for line in lines[1:3])
    assert set(whole) == {"━"}
    assert half.strip() == "━" * len(half.strip())
    assert len(whole) == len(half)
    assert len(half.strip()) == (len(whole) + 1) // 2


def test_a_span_whose_parent_is_missing_is_shown_at_the_top() -> None:
    spans = [
        *REQUEST,
        a_span("9", "77", name="orphan", at_ms=5),
        a_span("8", "9", name="below-orphan", at_ms=6),
    ]
    for text in (on_terminal(spans), render_text(spans)):
        lines = [line for line in text.splitlines() if "orphan" in line]
        assert lines[0].startswith("orphan (parent 77 not recorded)")
        assert "below-orphan" in lines[1]


def test_parents_that_go_in_a_circle_are_still_shown() -> None:
    spans = [a_span("1", "3"), a_span("2", "1"), a_span("3", "2"), a_span("5", "5"), a_span("6")]
    text = render_text(spans)
    assert all(f"span-{number}" in text for number in "12356")
    assert "parents go in a circle" in text
    assert on_terminal(spans).count("span-") == 5


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 14)), max_size=25))
def test_no_span_is_ever_lost_or_shown_twice(edges: list[tuple[int, int | None]]) -> None:
    spans = [
        a_span(f"{own:x}", None if parent is None else f"{parent:x}", name=f"[{at}]")
        for at, (own, parent) in enumerate(edges)
    ]
    for text in (render_text(spans), on_terminal(spans, width=160)):
        assert [text.count(f"[{at}]") for at in range(len(spans))] == [1] * len(spans)


def test_a_very_deep_trace_is_shown_whole() -> None:
    spans = [a_span(f"{at:x}", f"{at - 1:x}" if at else None, name=f"<{at}>", at_ms=at) for at in range(3000)]
    text = render_text(spans)
    assert all(f"<{at}>" in text for at in range(3000))
    assert f"<{2999}>" in on_terminal(spans, width=160)


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in on_terminal(REQUEST, width=width).splitlines())


HOSTILE = "[bold red]x[/]\x1b[2J\x1b]0;title\x07\r\nnext\u202eevil\u200b\x9b31m\ud800"


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    span = a_span(
        "1",
        name=HOSTILE,
        status="ERROR",
        status_message=HOSTILE,
        attributes={HOSTILE: HOSTILE, "list": [HOSTILE], "nested": [[HOSTILE]]},
        events=(StoredEvent(HOSTILE, BEGIN, {HOSTILE: HOSTILE}),),
        resource={"service.name": HOSTILE, "service.instance.id": HOSTILE},
    )
    for text in (on_terminal([span], width=400), render_text([span])):
        assert "[bold red]x[/]" in text
        assert "\\x1b[2J" in text
        assert "\\u202e" in text
        lines = text.splitlines()
        assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
        assert not any(line.startswith("next") for line in lines)


@given(st.text(st.characters(codec=None, exclude_categories=())), st.integers(1, 50))
def test_printable_text_is_printable_and_bounded(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit * 10
    assert printable(shown) == shown


def test_the_pipe_form_has_one_plain_line_per_span() -> None:
    text = render_text(REQUEST)
    lines = text.splitlines()
    assert len(lines) == 1 + len(REQUEST)
    assert text.isascii()
    assert lines[4].startswith("    kvorum.replica.generate")
    assert "ERROR" in lines[4]
    assert "error.type=REPLICA_LOST" in lines[4]


def test_a_huge_attribute_does_not_flood_the_terminal() -> None:
    span = a_span("1", attributes={"prompt": "word " * 10_000})
    assert len(on_terminal([span])) < 2000
    assert "…" in on_terminal([span])


STEPS = [
    replace(span, trace_id="cd" * 16)
    for span in (
        a_span("e1", name="step-rank-0", at_ms=30),
        a_span("e2", "e1", name="step-rank-1", at_ms=30),
        a_span("e3", "99", name="step-of-lost-parent", at_ms=50),
    )
]


def test_linked_spans_stand_below_the_span_that_links_to_them() -> None:
    lines = render_text(with_linked(REQUEST, [STEPS])).splitlines()
    assert lines[0].startswith(f"trace {'ab' * 16}: 7 spans")
    assert [line[: len(line) - len(line.lstrip())] + line.split()[0] for line in lines[4:]] == [
        "    kvorum.replica.generate",
        "      step-rank-0",
        "        step-rank-1",
        "      step-of-lost-parent",
    ]


def test_a_linked_trace_that_was_not_recorded_is_only_named() -> None:
    assert with_linked(REQUEST, [[]]) == REQUEST
    assert f"-> trace {'cd' * 16}" in render_text(with_linked(REQUEST, [[]]))


def test_traces_that_nothing_links_to_are_left_out() -> None:
    foreign = [replace(span, trace_id="12" * 16) for span in STEPS]
    assert with_linked(REQUEST, [foreign]) == REQUEST


def test_a_trace_that_links_to_itself_is_shown_once() -> None:
    linked = replace(REQUEST[2], links=(StoredLink("ab" * 16, "1"),))
    spans = [*REQUEST[:2], linked, REQUEST[3]]
    assert with_linked(spans, [spans]) == spans


def test_an_empty_trace_says_so() -> None:
    assert on_terminal([]).strip() == "no spans"
    assert render_text([]) == "no spans"
