"""Settings of the OpenAI-compatible HTTP ingress, validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Via = Literal["direct", "proxy"]


class HttpConfig(BaseModel):
    """Where the ingress listens, how Ray Serve runs it, and what it lets in. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(True, description="serve OpenAI's HTTP API beside gRPC")
    host: str = Field("127.0.0.1", description="address to listen on; loopback unless you say otherwise")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    via: Via = Field(
        "direct",
        description="the ingress replica listens itself, or Ray Serve's proxy in front of several",
    )
    replicas: int = Field(1, ge=1, description="ingress replicas; more than one need the proxy")
    max_replicas: int | None = Field(
        None, ge=1, description="Ray Serve adds ingress replicas up to this many under load (proxy)"
    )
    max_ongoing_requests: int = Field(
        1024, ge=1, description="requests in flight in one ingress replica; more are refused with 503"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time of one request")
    lookaside: bool = Field(
        True,
        description="routers decide, tokens come straight from the replicas; false: through the router",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key turns HTTPS on")
    tls_key: Path | None = Field(None, description="PEM private key")
    arguments: tuple[str, ...] = Field(
        (), description="flag of `vllm serve`'s front end, such as --tool-call-parser=hermes"
    )

    @model_validator(mode="after")
    def _is_whole(self) -> HttpConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas})")
        if self.via == "direct" and (self.max_replicas or self.replicas) > 1:
            raise ValueError("several ingress replicas need one proxy in front of them: set via to proxy")
        return self

    @property
    def scheme(self) -> Literal["http", "https"]:
        """What a client's URL begins with."""
        return "http" if self.tls_cert is None else "https"
