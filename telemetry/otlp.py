"""The OTLP exporter that the standard OTEL_* variables ask for."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.pipe import ReportingExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

Protocol = Literal["grpc", "http/protobuf"]
Signal = Literal["TRACES", "METRICS"]

# They log every retry of every batch; the reason is kept and reported once a minute instead.
_CHATTY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.common._internal",
)

_CREDENTIALS = re.compile(r"[^\s/@]+@")
"""The user part of a URL, which must not reach a log."""


@dataclass(frozen=True)
class OtlpTarget:
    """A collector. `endpoint` is for messages: the exporter reads the variables itself."""

    protocol: Protocol
    endpoint: str

    def __str__(self) -> str:
        return f"{self.endpoint} (OTLP {self.protocol})"


def sdk_is_disabled(env: Mapping[str, str]) -> bool:
    """OTEL_SDK_DISABLED=true."""
    return _get(env, "OTEL_SDK_DISABLED").lower() == "true"


def traces_are_off(env: Mapping[str, str]) -> bool:
    """OTEL_TRACES_EXPORTER=none."""
    return _exporters(env, "TRACES") == {"none"}


def target_from_environment(env: Mapping[str, str], signal: Signal = "TRACES") -> OtlpTarget | None:
    """The collector that OTEL_{signal}_EXPORTER and OTEL_EXPORTER_OTLP_* name, if they name one.

    A value that cannot be honoured is logged and means no collector: telemetry must not stop serving.
    """
    exporters, endpoint = _exporters(env, signal), _either(env, signal, "ENDPOINT")
    if exporters == {"none"} or ("otlp" not in exporters and not (endpoint and not exporters)):
        for name in sorted(exporters - {"otlp", "none"}):
            logger.warning("OTEL_%s_EXPORTER=%s is not supported: use otlp or none", signal, name)
        return None
    protocol = _either(env, signal, "PROTOCOL") or "grpc"
    if protocol == "grpc":
        return OtlpTarget("grpc", _without_credentials(endpoint or "http://localhost:4317"))
    if protocol == "http/protobuf":
        return OtlpTarget("http/protobuf", _without_credentials(endpoint or "http://localhost:4318"))
    logger.warning(
        "OTEL_EXPORTER_OTLP_PROTOCOL=%s is not supported: use %s; no %s are sent",
        protocol,
        " or ".join(get_args(Protocol)),
        "spans" if signal == "TRACES" else "metrics",
    )
    return None


class OtlpSpanExporter(ReportingExporter):
    """The library's OTLP exporter, quiet: its last complaint is `last_error`.

    Raises:
        Exception: whatever the library makes of malformed OTEL_* values.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._inner = _library_exporter(protocol)
        hush()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        reasons.forget()
        result = self._inner.export(spans)
        self.last_error = reasons.last
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Reasons(logging.Filter):
    """Swallows records and remembers the text of this thread's last one: each exporter has its thread."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = threading.local()

    def forget(self) -> None:
        self._heard.last = ""

    @property
    def last(self) -> str:
        """Without credentials."""
        return _CREDENTIALS.sub("***@", getattr(self._heard, "last", ""))

    def filter(self, record: logging.LogRecord) -> bool:
        self._heard.last = record.getMessage()
        return False


reasons = _Reasons()
"""Why the last export of this thread failed, since `forget`."""


def hush() -> None:
    """From now on the library's exporters tell `reasons`, and not the log."""
    for name in _CHATTY_LOGGERS:
        filters = logging.getLogger(name).filters
        if reasons not in filters:
            filters.insert(0, reasons)  # before the library's own, which drops repetitions


def _library_exporter(protocol: Protocol) -> SpanExporter:
    # Imported here: 0.1 s that a process without a collector need not spend.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter()


def _get(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def _either(env: Mapping[str, str], signal: Signal, suffix: str) -> str:
    """The variable for one signal, or the one for all; empty means unset."""
    return _get(env, f"OTEL_EXPORTER_OTLP_{signal}_{suffix}") or _get(env, f"OTEL_EXPORTER_OTLP_{suffix}")


def _exporters(env: Mapping[str, str], signal: Signal) -> set[str]:
    listed = _get(env, f"OTEL_{signal}_EXPORTER").split(",")
    return {name.strip().lower() for name in listed if name.strip()}


def _without_credentials(endpoint: str) -> str:
    return _CREDENTIALS.sub("", endpoint)
