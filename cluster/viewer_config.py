"""Settings of the built-in viewer, validated once, and what they mean for the other parts of a cluster."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.certificate import name_in
from cluster.failures import BadInput
from cluster.openai.settings import digest, key_digests
from protos.channels import ClientTls
from router.config import RouterConfig
from telemetry.config import TelemetryConfig, ViewerTarget
from telemetry.otlp import traces_are_off
from telemetry.viewer.settings import ViewerSettings

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound to, but replaced


class ViewerConfig(BaseModel):
    """Where the page over the whole cluster listens. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="run a page of requests, traces and the fleet, with /metrics")
    host: str = Field("127.0.0.1", description="address to listen on; loopback unless you say otherwise")
    port: int = Field(
        4320, ge=0, le=65535, description="page, API, /metrics and OTLP over HTTP; 0 picks a free one"
    )
    otlp_port: int = Field(0, ge=0, le=65535, description="OTLP over gRPC; 0 picks a free one")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key the page is HTTPS")
    tls_key: Path | None = Field(None, description="PEM private key")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ViewerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @property
    def url(self) -> str:
        """What a browser on this machine opens; only of a port that is not 0."""
        return f"{'http' if self.tls_cert is None else 'https'}://{self._reachable}:{self.port}"

    def target(self, token: str) -> ViewerTarget:
        """Where the cluster's processes send their metrics; only of a port that is not 0."""
        return ViewerTarget(address=f"{self._reachable}:{self.otlp_port}", token=viewer_key(token))

    @property
    def _reachable(self) -> str:
        host = _WILDCARDS.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host


def viewer_key(token: str) -> str:
    """By which a cluster's own processes are let in.

    Not the cluster's token: while a viewer is down, somebody else may listen where they send it.
    """
    return hmac.new(token.encode(), b"kvorum viewer", hashlib.sha256).hexdigest()


def told_of_viewer(telemetry: TelemetryConfig, viewer: ViewerConfig, token: str) -> TelemetryConfig:
    """The telemetry of every process of a cluster with this viewer, whose ports are chosen.

    The page shows what is in the local store, so that is kept beside a collector, too.
    """
    if not viewer.enabled or not telemetry.enabled:
        return telemetry
    store = "on" if telemetry.store == "auto" and not traces_are_off(os.environ) else telemetry.store
    return telemetry.model_copy(update={"viewer": viewer.target(token), "store": store})


def router_tls(router: RouterConfig) -> ClientTls | None:
    """How the viewer trusts a router with a certificate of its own; None of one that speaks plain text.

    Raises:
        BadInput: the certificate cannot be read.
    """
    if router.tls_cert is None:
        return None
    try:
        return ClientTls(ca=router.tls_cert, server_name=name_in(router.tls_cert))
    except (OSError, ValueError) as error:
        raise BadInput(f"router.tls_cert: {error}") from None


def settings_of(
    viewer: ViewerConfig, telemetry: TelemetryConfig, router: RouterConfig, token: str
) -> ViewerSettings:
    """What the viewer is started with. Whoever may use the router may look, and so may the cluster itself.

    Raises:
        BadInput: the file of API keys holds none, or cannot be read.
    """
    keys: tuple[str, ...] = ()
    if router.api_keys_file is not None:
        try:
            keys = (*key_digests(router.api_keys_file), digest(viewer_key(token)))
        except (OSError, ValueError) as error:
            raise BadInput(f"router.api_keys_file: {error}") from None
    return ViewerSettings(
        host=viewer.host,
        http_port=viewer.port,
        otlp_port=viewer.otlp_port,
        tls_cert=viewer.tls_cert,
        tls_key=viewer.tls_key,
        key_digests=keys,
        max_attribute_chars=telemetry.max_attribute_chars,
    )
