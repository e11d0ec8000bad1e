"""Which HTTP clients may come in: those that present a known key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class Keys:
    """Known keys by the hex SHA-256 of each; with none, everyone is welcome."""

    def __init__(self, digests: Iterable[str]) -> None:
        self._digests = tuple(digest.lower().encode() for digest in digests)

    def admit(self, authorization: str, x_api_key: str) -> bool:
        """Whether one of these headers' values ("" when absent) is a known key.

        OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`. Every known key is
        compared, in constant time each, so that the time tells nothing.
        """
        if not self._digests:
            return True
        scheme, _, token = authorization.partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given += [x_api_key] if x_api_key else []
        matches = [hmac.compare_digest(_digest(key), known) for key in given for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    # Header values are bytes that are read as Latin-1: what the client sent is hashed, whatever it means.
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest().encode()
