"""All that an HTTP ingress needs to know; it travels as JSON, as the argument of its Serve application."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from telemetry.config import TelemetryConfig


class IngressSettings(BaseModel):
    """Which cluster to speak for, and how. Frozen; `model_dump(mode="json")` and back gives an equal one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: str = Field(description="name of the cluster")
    routers: tuple[str, ...] = Field(min_length=1, description="host:port of each router")
    admin_address: str = Field(description="host:port of the controller's admin API")
    token: str = Field(repr=False, description="the cluster's own token, for routers and controller")
    tls_ca: Path | None = Field(None, description="PEM roots of the routers; None: they speak plain text")
    tls_server_name: str | None = Field(
        None, description="name in the routers' certificate, where it is not their address"
    )
    api_keys: tuple[str, ...] = Field(
        (), repr=False, description="hex SHA-256 of each key a client may present; none: no key is asked for"
    )
    arguments: tuple[str, ...] = Field(
        (), description="flags of `vllm serve`'s front end, such as --tool-call-parser hermes"
    )
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="traces")
    max_ongoing_requests: int = Field(
        1024, ge=1, description="requests in flight in one ingress replica; more are refused with 503"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time of one request, seconds")
    start_timeout_s: float = Field(
        600.0, gt=0, description="a cluster that has not said what it serves by then has failed, seconds"
    )
    lookaside: bool = Field(
        True, description="stream tokens from the replicas themselves, with no router in their path"
    )
    scratch: Path | None = Field(
        None, description="existing folder for temporary files, which goes when the cluster ends"
    )
    front_cores: tuple[int, ...] = Field((), description="cores to run on; empty: any")


def key_digests(path: Path) -> tuple[str, ...]:
    """Hex SHA-256 of each key of a file, one a line; # starts a comment.

    Raises:
        ValueError: there is none in it. OSError: it cannot be read.
    """
    lines = (line.strip() for line in path.read_text().splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no API key: one a line, # starts a comment")
    return tuple(digest(key) for key in keys)


def digest(key: str) -> str:
    """As `IngressSettings.api_keys` holds a key."""
    return hashlib.sha256(key.encode()).hexdigest()
