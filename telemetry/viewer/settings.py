"""What the viewer is told at its start."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ViewerSettings(BaseModel):
    """Where the viewer listens, whom it lets in, and how much it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address for the page, its API and OTLP")
    http_port: int = Field(
        4320, ge=0, le=65535, description="page, API, metrics and OTLP/HTTP; 0: a free one"
    )
    otlp_port: int = Field(0, ge=0, le=65535, description="OTLP/gRPC; 0: a free one")
    key_digests: tuple[str, ...] = Field(
        (), description="hex SHA-256 of each key; without any, none is asked for"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key the page is HTTPS")
    tls_key: Path | None = Field(None, description="PEM private key")
    max_body_mib: int = Field(16, ge=1, le=1024, description="largest OTLP export, decompressed")
    max_exports: int = Field(
        8, ge=1, description="OTLP exports taken in at a time, over HTTP and over gRPC each"
    )
    body_timeout_s: float = Field(10.0, gt=0, description="a body that takes longer to arrive is refused")
    max_attribute_chars: int = Field(4096, ge=64, description="longer texts of received spans are cut")
    max_series: int = Field(50_000, ge=1, description="metric series kept; more are refused and counted")
    metric_silence_s: float = Field(
        60.0, gt=0, description="metrics of a process that has not sent any for so long are forgotten"
    )
    scrape_timeout_s: float = Field(
        3.0, gt=0, description="longest wait for the replicas' own metrics, and for the state of the fleet"
    )
    cache_s: float = Field(1.0, ge=0, description="how old a scrape or a fleet state may be when it is shown")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect, so that a foreign Host header means DNS rebinding."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
