"""Log lines that can be found by their trace."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from telemetry import logs, spans
from telemetry.logs import configure_logging, speak_of

tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_spoken_of() -> Iterator[None]:
    """Tests that make a request's spans without a task of its own leave it in this thread's context."""
    token = logs._subject.set(None)
    yield
    logs._subject.reset(token)


def test_a_json_record_within_a_span_names_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("kvorum.router", "info", "json")
    with spans.recording(tracer, "request") as span:
        logging.getLogger("router.server").warning("slow %s", 'a"b\nc')
    logging.getLogger("router.server").info("outside")
    inside, outside = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert inside["trace_id"] == spans.trace_id_hex(span)
    assert len(inside["span_id"]) == 16
    assert inside["message"] == 'slow a"b\nc'
    assert (inside["service"], inside["logger"], inside["level"]) == (
        "kvorum.router",
        "router.server",
        "WARNING",
    )
    assert "trace_id" not in outside


def test_a_text_record_is_one_line_and_cannot_forge_another(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("kvorum.router")
    with spans.recording(tracer, "request") as span:
        logging.getLogger("x").info("user \x1b[2J said\n12:00:00.000 ERROR kvorum.router forged")
    lines = capsys.readouterr().err.splitlines()
    assert "INFO    kvorum.router x: user \\x1b[2J said" in lines[0]
    assert lines[1].startswith("    12:00:00.000 ERROR"), "continuation lines are indented"
    context = span.get_span_context()
    assert lines[1].endswith(f" trace_id={spans.trace_id_hex(span)} span_id={context.span_id:016x}")


async def test_records_of_a_requests_task_and_its_children_name_it_in_both_formats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(name: str, span: trace.SpanContext) -> None:
        speak_of(name, span)
        await asyncio.sleep(0)
        await asyncio.create_task(work(name))

    async def work(name: str) -> None:
        logging.getLogger("x").info("about %s", name)

    known = spans.elsewhere(0xA1, 0xB1)
    configure_logging("kvorum.router", "info", "json")
    await asyncio.gather(serve("first", known), serve("second", trace.INVALID_SPAN_CONTEXT))
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["request_id"], first["trace_id"], first["span_id"]) == (
        "first",
        f"{0xA1:032x}",
        f"{0xB1:016x}",
    )
    assert second["request_id"] == "second"
    assert "trace_id" not in second
    configure_logging("kvorum.router", "info", "text")
    await asyncio.create_task(serve("a\x1b[2J\nb" + "c" * 200, known))
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f" trace_id={0xA1:032x} span_id={0xB1:016x} request_id=a\\x1b[2J\\nb" in line
    logging.getLogger("x").info("outside")
    assert "request_id" not in capsys.readouterr().err


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_exception_is_logged_with_its_traceback(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("kvorum.router", "INFO", format)  # type: ignore[arg-type]
    try:
        raise ValueError("deep down")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "ValueError: deep down" in capsys.readouterr().err


def test_configuring_again_replaces_the_earlier_handler(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("first")
    configure_logging("second", "ERROR", "text")
    logging.getLogger("x").warning("hidden")
    logging.getLogger("x").error("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "second x: once" in lines[0]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("x", "loud")
