"""Settings of the router, validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PolicyName = Literal[
    "predicted-time", "prefix-affinity", "power-of-two", "least-loaded", "round-robin", "random"
]


class RouterConfig(BaseModel):
    """How one router listens, chooses, queues and bounds requests. Times are seconds unless named _ms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless you say otherwise")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    policy: PolicyName = Field("predicted-time", description="how a replica is chosen")
    harm_weight: float = Field(
        0.3,
        ge=0,
        le=10,
        description="ms of a request's own TTFT that one ms of delay to others is worth (predicted-time)",
    )
    near_tie_ms: float = Field(
        1.0, ge=0, description="predicted costs this close are equal; chance decides (predicted-time)"
    )
    near_tie_percent: float = Field(
        3.0, ge=0, le=100, description="the same, as a share of the least predicted TTFT"
    )
    affinity_ms: float = Field(
        20.0, ge=0, description="how much slower a session's preferred replica may be and still be taken"
    )
    replica_queue_ms: float = Field(
        2000.0,
        gt=0,
        description="a replica with a longer predicted queue is full: requests wait in the router",
    )
    max_queue: int = Field(1024, ge=1, description="requests that wait, per model; more are refused")
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="hold requests this long, to release them together; 0: off",
    )
    max_batch_tokens: int = Field(
        8192, ge=1, description="prompt tokens that end the hold of --max-wait-ms early"
    )
    ticket_s: float = Field(
        30.0, gt=0, le=3600, description="a lookaside client must start its stream within this time"
    )
    max_replica_blocks: int = Field(
        4_000_000, ge=1, description="most blocks one replica may claim; one that claims more is not believed"
    )
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
