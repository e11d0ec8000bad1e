"""Asks an HTTP face how far it is, without any client library."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from cluster.openai.instance import HEADER, instance_of


@dataclass(frozen=True)
class Readiness:
    """What `/readyz` said. `phase` is why it is not ready, empty when nothing answered."""

    ready: bool
    phase: str
    foreign: bool = False
    """Something else answers at this address."""

    @property
    def answered(self) -> bool:
        return not self.foreign and (self.ready or bool(self.phase))

    @property
    def failed(self) -> bool:
        """It gave up, and will not be ready by waiting."""
        return self.phase.startswith("failed")


def ask_readiness(address: str, token: str, timeout_s: float = 1.0) -> Readiness:
    """Ask `http://host:port` or `https://host:port`, never through a proxy, whether the face is ready.

    Args:
        token: of the cluster whose face it should be; it is not sent.

    The certificate is not checked: it may well not be for this name, and nothing secret is sent.
    """
    url = urlsplit(address)
    host, port = url.hostname or "", url.port or 0
    if url.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host,
            port,
            timeout=timeout_s,
            context=ssl._create_unverified_context(),  # noqa: S323
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read(65_536)
    except (OSError, http.client.HTTPException):
        return Readiness(False, "")
    finally:
        connection.close()
    if response.headers.get(HEADER) != instance_of(token):
        return Readiness(False, "something else answers at this address", foreign=True)
    return Readiness(response.status == http.client.OK, _phase(body) or f"answers {response.status}")


def _phase(body: bytes) -> str:
    try:
        phase = json.loads(body)["phase"]
    except (ValueError, TypeError, KeyError):
        return ""
    return phase if isinstance(phase, str) else ""
