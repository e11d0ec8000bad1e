"""Asks a running viewer, without any client library and never through a proxy."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

_MOST_BYTES = 64 * 2**20


def is_alive(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a viewer answers at `http://host:port`."""
    return _get(url, "/healthz", "", timeout_s) is not None


def read_metrics(url: str, key: str, timeout_s: float = 5.0) -> str | None:
    """Its `/metrics`: Prometheus text of the whole cluster; None when it does not answer with that."""
    body = _get(url, "/metrics", key, timeout_s)
    return None if body is None else body.decode("utf-8", "replace")


def _get(url: str, path: str, key: str, timeout_s: float) -> bytes | None:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.read(_MOST_BYTES) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
