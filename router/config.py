"""Settings of the router, validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PolicyName = Literal["least-loaded", "round-robin", "random"]


class RouterConfig(BaseModel):
    """How one router listens, chooses and bounds requests. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless you say otherwise")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    policy: PolicyName = Field("least-loaded", description="how a replica is chosen")
    default_deadline_s: float = Field(600.0, gt=0, description="for requests that come without a deadline")
    max_n: int = Field(16, ge=1, description="most sequences per request")
    max_attempts: int = Field(2, ge=1, description="replicas tried until a request has its first token")
    max_streams: int = Field(4096, ge=1, description="most requests in flight; more are refused")
    heartbeat_s: float = Field(1.0, gt=0, description="silence of a replica for 3 of these marks it suspect")
    api_keys_file: Path | None = Field(None, description="one API key a line; without it no key is asked for")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key turns TLS on")
    tls_key: Path | None = Field(None, description="PEM private key")
    tls_client_ca: Path | None = Field(None, description="PEM roots that client certificates must chain to")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> RouterConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self
