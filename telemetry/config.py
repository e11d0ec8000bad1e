"""Settings of tracing, validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ViewerTarget(BaseModel):
    """Where a cluster's viewer takes metrics: its OTLP/gRPC port, plain text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(description="host:port")
    token: str = Field("", repr=False, description="sent as a bearer token; empty: none is")


class TelemetryConfig(BaseModel):
    """How spans are sampled, queued and kept, what metrics and logs say.

    Where spans and metrics are sent is said by the standard OTEL_* environment variables; without them
    spans go to a small store on this host, which `kvorum trace` reads. Metrics go to the cluster's viewer
    besides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(
        True, description="record spans; off, the caller's trace context is still passed on"
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of new traces recorded; a request that brings a trace keeps its decision",
    )
    keep_slow_s: float = Field(
        5.0,
        ge=0,
        description="requests that fail, or take more seconds than this, are recorded by HTTP face and "
        "router although sample_ratio left them out; 0: they are not",
    )
    step_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of requests whose prefill steps every shard records, times sample_ratio; drawn "
        "apart from the requests' own traces, so with a low sample_ratio most belong to unrecorded ones",
    )
    export_delay_ms: int = Field(
        500,
        ge=1,
        le=60_000,
        description="longest wait of a finished span before export; a killed process loses these, "
        "but for one of each request",
    )
    max_queued_spans: int = Field(
        8192, ge=1, description="spans waiting for one exporter; more are dropped and counted"
    )
    max_batch_spans: int = Field(512, ge=1, description="spans in one export")
    max_attribute_chars: int = Field(4096, ge=64, description="longer attribute values are cut")
    record_prompts: bool = Field(
        False, description="record what is asked and answered, as text; off, no span holds any of it"
    )
    tenant_metrics: bool = Field(False, description="count requests by tenant, too: 100 of them at most")
    log_format: Literal["text", "json"] = Field(
        "text", description="log records of every process: a line for people, or one JSON object"
    )
    store: Literal["auto", "on", "off"] = Field(
        "auto", description="local span store; auto: unless OTEL_* variables name a collector or 'none'"
    )
    store_path: Path | None = Field(
        None, description="file of the local span store; in the user's state folder by default"
    )
    store_max_spans: int = Field(200_000, ge=1, description="oldest spans beyond this many are deleted")
    store_max_age_s: float = Field(
        7 * 86_400, gt=0, description="spans older than this many seconds are deleted"
    )
    store_max_mib: int = Field(
        256, ge=1, description="oldest spans are deleted when the store grows beyond this many MiB"
    )

    viewer: ViewerTarget | None = Field(
        None,
        description="set by the launcher: where the processes of a cluster send their metrics",
        json_schema_extra={"internal": True},
    )

    @model_validator(mode="after")
    def _batch_fits_queue(self) -> TelemetryConfig:
        if self.max_batch_spans > self.max_queued_spans:
            raise ValueError(
                f"max_batch_spans ({self.max_batch_spans}) must not exceed"
                f" max_queued_spans ({self.max_queued_spans})"
            )
        return self
