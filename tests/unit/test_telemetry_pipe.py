"""From finished spans to an exporter: nothing waits, nothing is lost without being counted."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from telemetry.pipe import PipeCounts, ReportingExporter, SpanPipe


class FakeExporter(ReportingExporter):
    """Keeps what it gets, fails or stalls when told to."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.gate.wait(30)
        if self.fails:
            self.last_error = "collector away"
            return SpanExportResult.FAILURE
        self.batches.append([span.name for span in spans])
        return SpanExportResult.SUCCESS


@pytest.fixture
def exporter() -> Iterator[FakeExporter]:
    exporter = FakeExporter()
    yield exporter
    exporter.gate.set()


def make(
    exporter: FakeExporter, *, max_queue: int = 100, max_batch: int = 10, delay_s: float = 60.0
) -> SpanPipe:
    return SpanPipe(exporter, target="fake", max_queue=max_queue, max_batch=max_batch, delay_s=delay_s)


def end_spans(pipe: SpanPipe, *names: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(pipe)
    for name in names:
        provider.get_tracer("test").start_span(name).end()


def until(condition: object, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def test_flush_exports_everything_that_ended_before_it_in_order(exporter: FakeExporter) -> None:
    pipe = make(exporter)
    names = [f"span {number}" for number in range(25)]
    end_spans(pipe, *names)
    assert pipe.flush(10)
    assert [name for batch in exporter.batches for name in batch] == names
    assert all(len(batch) <= 10 for batch in exporter.batches)
    assert pipe.counts == PipeCounts(accepted=25, exported=25, failed=0, refused=0)


def test_spans_are_exported_after_the_delay_without_a_flush(exporter: FakeExporter) -> None:
    pipe = make(exporter, delay_s=0.02)
    end_spans(pipe, "a")
    until(lambda: exporter.batches == [["a"]])
    end_spans(pipe, "b")
    until(lambda: exporter.batches == [["a"], ["b"]])


def test_a_full_batch_does_not_wait_for_the_delay(exporter: FakeExporter) -> None:
    pipe = make(exporter, delay_s=600)
    end_spans(pipe, *map(str, range(10)))
    until(lambda: len(exporter.batches) == 1)


def test_spans_beyond_the_queue_are_dropped_and_counted_while_the_exporter_stalls(
    exporter: FakeExporter,
) -> None:
    pipe = make(exporter, max_queue=20)
    exporter.gate.clear()
    end_spans(pipe, *map(str, range(10)))
    assert exporter.entered.wait(10)
    end_spans(pipe, *map(str, range(10, 50)))
    assert pipe.counts == PipeCounts(accepted=30, exported=0, failed=0, refused=20)
    assert pipe.counts.dropped == 20
    assert pipe.counts.pending == 30
    exporter.gate.set()
    assert pipe.flush(10)
    assert pipe.counts == PipeCounts(accepted=30, exported=30, failed=0, refused=20)


def test_flush_gives_up_at_its_timeout_and_the_export_goes_on(exporter: FakeExporter) -> None:
    pipe = make(exporter)
    exporter.gate.clear()
    end_spans(pipe, "a")
    assert not pipe.flush(0.05)
    exporter.gate.set()
    assert pipe.flush(10)
    assert exporter.batches == [["a"]]


def test_failed_exports_are_counted_and_logged_once_a_minute(
    exporter: FakeExporter, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = make(exporter)
    exporter.fails = True
    with caplog.at_level(logging.INFO, "telemetry.pipe"):
        for number in range(20):
            end_spans(pipe, str(number))
            assert pipe.flush(10)
    assert pipe.counts == PipeCounts(accepted=20, exported=0, failed=20, refused=0)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot export spans to fake: collector away; 1 spans dropped so far, serving goes on"
    ]
    exporter.fails = False
    end_spans(pipe, "after")
    assert pipe.flush(10)
    assert exporter.batches == [["after"]]


def test_an_exporter_that_raises_does_not_end_the_pipe(
    exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_spans: object) -> SpanExportResult:
        raise RuntimeError("bug")

    pipe = make(exporter)
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "export", broken)
        end_spans(pipe, "a")
        assert pipe.flush(10)
    end_spans(pipe, "b")
    assert pipe.flush(10)
    assert exporter.batches == [["b"]]
    assert pipe.counts.failed == 1


def test_shutdown_exports_what_waits_and_refuses_what_comes_later(exporter: FakeExporter) -> None:
    pipe = make(exporter)
    end_spans(pipe, "a")
    pipe.shutdown(10)
    end_spans(pipe, "late")
    assert exporter.batches == [["a"]]
    assert pipe.counts == PipeCounts(accepted=1, exported=1, failed=0, refused=1)


def test_shutdown_with_a_stalled_exporter_drops_the_rest_and_says_how_many(exporter: FakeExporter) -> None:
    pipe = make(exporter)
    exporter.gate.clear()
    end_spans(pipe, *map(str, range(10)))
    assert exporter.entered.wait(10)
    end_spans(pipe, "x", "y", "z")
    pipe.shutdown(0.05)
    assert pipe.counts.failed == 3
    exporter.gate.set()
    until(lambda: pipe.counts.pending == 0)
    assert pipe.counts == PipeCounts(accepted=13, exported=10, failed=3, refused=0)


def test_unsampled_spans_are_not_queued(exporter: FakeExporter) -> None:
    pipe = make(exporter)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(pipe)
    provider.get_tracer("test").start_span("quiet").end()
    assert pipe.counts.accepted == 0
