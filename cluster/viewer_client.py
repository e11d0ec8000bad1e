"""Asks a running viewer, without any client library and never through a proxy."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from urllib.parse import urlsplit

_MOST_BYTES = 64 * 2**20


def is_alive(url: str, timeout_s: float = 1.0, *, ca: Path | None = None) -> bool:
    """Whether a viewer answers at `http://host:port`, or `https` with the very certificate `ca`."""
    return _get(url, "/healthz", "", ca, timeout_s) is not None


def read_metrics(url: str, key: str, timeout_s: float = 5.0, *, ca: Path | None = None) -> str | None:
    """Its `/metrics`: Prometheus text of the whole cluster; None when it does not answer with that."""
    body = _get(url, "/metrics", key, ca, timeout_s)
    return None if body is None else body.decode("utf-8", "replace")


def _get(url: str, path: str, key: str, ca: Path | None, timeout_s: float) -> bytes | None:
    where = urlsplit(url)
    host, port = where.hostname or "", where.port
    try:
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if where.scheme == "http"
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_trusting(ca))
        )
    except OSError:  # the certificate cannot be read any more
        return None
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.read(_MOST_BYTES) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _trusting(ca: Path | None) -> ssl.SSLContext:
    """This certificate alone, whoever issued it, and under whatever name it is reached here.

    Raises:
        OSError: it cannot be read.
    """
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = ca is None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
