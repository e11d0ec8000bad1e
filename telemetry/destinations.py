"""Where the spans of a process go, by its settings and environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from telemetry.config import TelemetryConfig
from telemetry.journal import SpanJournal
from telemetry.otlp import OtlpSpanExporter, OtlpTarget, target_from_environment, traces_are_off
from telemetry.pipe import ReportingExporter, SpanPipe
from telemetry.store import SpanStore, StoreSpanExporter, default_store_path

logger = logging.getLogger(__name__)

STORE = "store"
OTLP = "otlp"


def open_pipes(config: TelemetryConfig, journal: SpanJournal | None) -> dict[str, SpanPipe]:
    """By destination; the journal waits for the first of them. Trouble with one is logged, never raised."""
    pipes: dict[str, SpanPipe] = {}
    target = target_from_environment(os.environ)
    if target is not None and (otlp := _otlp_exporter(target)) is not None:
        pipes[OTLP] = _pipe(otlp, str(target), config, journal)
    if config.store == "on" or (config.store == "auto" and not pipes and not traces_are_off(os.environ)):
        store = open_store(config)
        exporter = StoreSpanExporter(store)
        pipes[STORE] = _pipe(exporter, str(store.path), config, None if pipes else journal)
    return pipes


def open_store(config: TelemetryConfig) -> SpanStore:
    """The local store of this configuration; the file is touched at the first use."""
    return SpanStore(
        config.store_path or default_store_path(),
        max_spans=config.store_max_spans,
        max_age_s=config.store_max_age_s,
        max_bytes=config.store_max_mib * 1024 * 1024,
    )


def journal_folder(config: TelemetryConfig) -> Path:
    """Where the processes with this configuration note what they have open."""
    path = config.store_path or default_store_path()
    return path.with_name(f"{path.name}.open")


def open_journal(config: TelemetryConfig, resource: Mapping[str, object]) -> SpanJournal | None:
    """None, and a line in the log, where the file cannot be made."""
    try:
        return SpanJournal(journal_folder(config), resource)
    except OSError as error:
        logger.warning("what a killed process had open will be lost: no journal of it: %s", error)
        return None


def _otlp_exporter(target: OtlpTarget) -> OtlpSpanExporter | None:
    try:
        return OtlpSpanExporter(target.protocol)
    except Exception as error:  # the library has no common error for malformed OTEL_* values
        logger.warning("cannot send spans to %s, check OTEL_EXPORTER_OTLP_*: %s", target, error)
        return None


def _pipe(
    exporter: ReportingExporter, target: str, config: TelemetryConfig, journal: SpanJournal | None
) -> SpanPipe:
    return SpanPipe(
        exporter,
        target=target,
        max_queue=config.max_queued_spans,
        max_batch=config.max_batch_spans,
        delay_s=config.export_delay_ms / 1e3,
        done=None if journal is None else journal.exported,
    )
