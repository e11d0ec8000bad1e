"""What a killed process had open is closed by the next one, once, and as its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind

from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.destinations import journal_folder
from telemetry.journal import SLOTS, SUFFIX, SpanJournal, collect
from telemetry.record import StoredSpan
from telemetry.recovery import LOST, settle
from telemetry.setup import Telemetry, configure
from telemetry.store import SpanStore

PARENT = 0xB7AD6B7169203331
TRACE = 0x0AF7651916CD43DD8448EB211C80319C

_VICTIM = """
import sys, time
from pathlib import Path
from opentelemetry.trace import SpanKind
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.setup import configure

telemetry = configure("kvorum.router", "router-7", TelemetryConfig(
    store="on", store_path=Path(sys.argv[1]), export_delay_ms=60_000))
above = spans.remote(spans.elsewhere(int(sys.argv[2]), int(sys.argv[3])))
kept = spans.start(telemetry.tracer, "open", above, kind=SpanKind.SERVER)
inner = spans.start(telemetry.tracer, "inner", spans.below(kept))
spans.finish(spans.start(telemetry.tracer, "ended", kind=SpanKind.SERVER))
spans.finish(spans.start(telemetry.tracer, "refused", kind=SpanKind.SERVER), "INVALID_REQUEST")
done = spans.start(telemetry.tracer, "exported", kind=SpanKind.SERVER)
spans.finish(done)
if sys.argv[4] == "exports":
    telemetry.flush(10)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> TelemetryConfig:
    return TelemetryConfig(store="on", store_path=tmp_path / "traces.db")


@pytest.fixture
def telemetry(config: TelemetryConfig) -> Iterator[Telemetry]:
    opened = configure("kvorum.router", "router-8", config)
    yield opened
    opened.shutdown()


def killed(config: TelemetryConfig, *, exports: bool = False) -> None:
    """A process that had spans open, and had some ended, when it was killed."""
    told = [str(config.store_path), str(TRACE), str(PARENT), "exports" if exports else "keeps"]
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, *told], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"ready\n"
    assert settle(config) == 0, "it lives: what it has open is its own"
    victim.send_signal(signal.SIGKILL)
    victim.wait()


def stored(config: TelemetryConfig) -> dict[str, StoredSpan]:
    assert config.store_path is not None
    store = SpanStore(config.store_path)
    found = {span.name: span for summary in store.recent() for span in store.trace(summary.trace_id)}
    store.close()
    return found


def test_the_next_process_closes_what_a_killed_one_had_open(config: TelemetryConfig) -> None:
    began_ns = time.time_ns()
    killed(config)
    successor = configure("kvorum.router", "router-7", config)
    successor.shutdown()
    found = stored(config)
    assert set(found) == {"open", "ended", "refused", "exported"}
    lost = found["open"]
    assert (lost.trace_id, lost.parent_id) == (f"{TRACE:032x}", f"{PARENT:016x}")
    assert lost.attributes[spans.ERROR_TYPE] == LOST
    assert began_ns <= lost.start_ns <= lost.end_ns <= time.time_ns()
    assert lost.service == "kvorum.router"
    assert spans.ERROR_TYPE not in found["ended"].attributes
    assert found["refused"].attributes[spans.ERROR_TYPE] == "INVALID_REQUEST"
    assert list(journal_folder(config).iterdir()) == []


def test_where_no_process_follows_they_are_settled_once(config: TelemetryConfig) -> None:
    killed(config)
    assert settle(config) == 4
    assert settle(config) == 0
    assert len(stored(config)) == 4


def test_what_was_exported_is_not_told_again(config: TelemetryConfig) -> None:
    killed(config, exports=True)
    assert settle(config) == 1
    assert set(stored(config)) == {"open", "ended", "refused", "exported"}


def test_a_process_that_ends_in_order_leaves_nothing(config: TelemetryConfig) -> None:
    telemetry = configure("kvorum.router", "router-8", config)
    spans.finish(spans.start(telemetry.tracer, "whole", kind=SpanKind.SERVER))
    [_file] = journal_folder(config).iterdir()
    telemetry.shutdown()
    assert list(journal_folder(config).iterdir()) == []
    assert set(stored(config)) == {"whole"}


def test_more_spans_than_there_are_places_are_recorded_all_the_same(
    telemetry: Telemetry, config: TelemetryConfig
) -> None:
    opened = [spans.start(telemetry.tracer, f"{n}", kind=SpanKind.SERVER) for n in range(SLOTS + 10)]
    for span in opened:
        spans.finish(span)
    assert telemetry.flush(20)
    again = spans.start(telemetry.tracer, "again", kind=SpanKind.SERVER)
    [journal] = journal_folder(config).iterdir()
    assert b"again" in journal.read_bytes(), "the places of those that were exported are free again"
    spans.finish(again)


def test_a_span_that_finds_no_room_to_be_exported_frees_its_place(config: TelemetryConfig) -> None:
    tiny = config.model_copy(update={"max_queued_spans": 1, "max_batch_spans": 1, "export_delay_ms": 60_000})
    telemetry = configure("kvorum.router", "router-8", tiny)
    for number in range(3 * SLOTS):
        spans.finish(spans.start(telemetry.tracer, f"{number}", kind=SpanKind.SERVER))
    last = spans.start(telemetry.tracer, "the last one", kind=SpanKind.SERVER)
    [journal] = journal_folder(config).iterdir()
    assert b"the last one" in journal.read_bytes()
    spans.finish(last)
    telemetry.shutdown()


def test_a_fork_leaves_the_journal_to_its_parent(telemetry: Telemetry, config: TelemetryConfig) -> None:
    span = spans.start(telemetry.tracer, "parent's", kind=SpanKind.SERVER)
    child = os.fork()
    if child == 0:
        spans.finish(spans.start(telemetry.tracer, "child's", kind=SpanKind.SERVER))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert settle(config) == 0
    [journal] = journal_folder(config).iterdir()
    assert b"parent's" in journal.read_bytes()
    assert b"child's" not in journal.read_bytes()
    spans.finish(span)


@pytest.mark.parametrize("content", [b"", b"kvspans1", b"garbage" * 5000, b"kvspans1" + b"\xff" * 9000])
def test_a_file_that_is_no_journal_is_given_up(
    config: TelemetryConfig, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    killed(config)
    bad = journal_folder(config) / f"bad{SUFFIX}"
    bad.write_bytes(content)
    assert settle(config) == 4
    assert not bad.exists()
    assert str(bad) in caplog.text


def test_a_half_written_place_is_free(tmp_path: Path) -> None:
    journal = SpanJournal(tmp_path, {"service.name": "kvorum.router"})
    copy = tmp_path / f"copy{SUFFIX}"
    content = bytearray(journal.path.read_bytes())
    content[8192] = 1  # open, with ids of zeros
    content[8192 + 200] = 77  # no state there is
    copy.write_bytes(content)
    journal.shutdown()
    [left] = collect(tmp_path)
    assert left.spans == ()
    assert left.resource == {"service.name": "kvorum.router"}


def test_without_a_place_for_the_journal_spans_are_recorded_all_the_same(
    config: TelemetryConfig, caplog: pytest.LogCaptureFixture
) -> None:
    journal_folder(config).write_text("no folder")
    telemetry = configure("kvorum.router", "router-8", config)
    spans.finish(spans.start(telemetry.tracer, "whole", kind=SpanKind.SERVER))
    telemetry.shutdown()
    assert set(stored(config)) == {"whole"}
    assert "no journal of it" in caplog.text
