"""Tickets of lookaside streams: a router lets a client call one replica, once, with one request, for a while.

A ticket is `base64url(claims) "." base64url(HMAC-SHA256)`, without padding. The key is derived from the
cluster's token, so routers and replicas need no other secret. A holder of tickets who guesses the token
can check the guess, so the token must be random (the cluster mints 256 bits). Pure: time comes in.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import hmac
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from protos import common_pb2
from protos.errors import KvorumError

TICKET_KEY: Final = "kvorum-ticket"
"""The call metadata that carries a ticket."""
ATTEMPT_KEY: Final = "kvorum-attempt"
"""The metadata of `Route` with the id that the client wants for the attempt."""
MAX_TICKET_CHARS: Final = 2048
CLOCK_SKEW_S: Final = 5.0
"""How far the clocks of a router and a replica may differ."""
MAX_LIFETIME_S: Final = 3600.0
"""A ticket for longer is refused: the replica remembers each used one until it expires."""
MAX_USED: Final = 200_000
"""Tickets remembered as used; about 50 MiB."""

_VERSION: Final = 1
_LABEL: Final = b"kvorum lookaside ticket 1"


@dataclass(frozen=True)
class Claims:
    """What a ticket says. `expires_at` is in unix seconds."""

    replica: str
    epoch: str
    attempt_id: str
    expires_at: float
    request_sha256: str


def sign(secret: str, request: bytes, *, replica: str, epoch: str, attempt_id: str, expires_at: float) -> str:
    """A ticket for exactly `request`, a serialised ReplicaGenerateRequest. It holds only URL-safe characters.

    Raises:
        ValueError: the secret or a claim is empty, not finite or too long.
    """
    if not (secret and replica and epoch and attempt_id and math.isfinite(expires_at)):
        raise ValueError("a ticket needs a secret, a replica, an epoch, an attempt id and a finite expiry")
    claims = [_VERSION, replica, epoch, attempt_id, expires_at, hashlib.sha256(request).hexdigest()]
    body = _to_text(json.dumps(claims, separators=(",", ":")).encode())
    ticket = f"{body}.{_mac(secret, body)}"
    if len(ticket) > MAX_TICKET_CHARS:
        raise ValueError(f"a ticket of {len(ticket)} characters, at most {MAX_TICKET_CHARS} are accepted")
    return ticket


def verify(ticket: str, secret: str, *, request: bytes, replica: str, epoch: str, now: float) -> Claims:
    """The claims of a ticket that is good for `request` at this replica and epoch at `now`, unix seconds.

    Nothing of a ticket is parsed before its signature has proven right.

    Raises:
        KvorumError: UNAUTHENTICATED with TICKET_INVALID; the message says what is wrong with it.
    """
    if len(ticket) > MAX_TICKET_CHARS:
        raise refusal(f"it has {len(ticket)} characters, at most {MAX_TICKET_CHARS} are accepted")
    body, dot, signature = ticket.partition(".")
    if not dot or not ticket.isascii():
        raise refusal("it is malformed")
    # As text: the same bytes have several spellings, of which one was signed.
    if not secret or not hmac.compare_digest(signature, _mac(secret, body)):
        raise refusal("it was not signed by a router of this cluster")
    claims = _claims(body)
    if now > claims.expires_at + CLOCK_SKEW_S:
        raise refusal(f"it expired {now - claims.expires_at:.1f} s ago")
    if claims.expires_at > now + MAX_LIFETIME_S + CLOCK_SKEW_S:
        raise refusal(f"it is good for longer than {MAX_LIFETIME_S:g} s: compare the hosts' clocks")
    if claims.replica != replica:
        raise refusal(f"it is for replica '{claims.replica}', this is '{replica}'")
    if claims.epoch != epoch:
        raise refusal(f"it is for epoch '{claims.epoch}' of '{replica}', which has restarted as '{epoch}'")
    if claims.request_sha256 != hashlib.sha256(request).hexdigest():
        raise refusal("it is for another request: send the router's bytes unchanged")
    return claims


class UsedTickets:
    """The attempts whose tickets were used, each remembered until its ticket has expired. Bounded."""

    def __init__(self, most: int = MAX_USED) -> None:
        self._most = most
        self._attempts: set[str] = set()
        self._expiries: list[tuple[float, str]] = []  # a heap
        self._forgotten = -math.inf
        """Tickets that expired before this are not remembered, hence refused even if the clock goes back."""

    def __len__(self) -> int:
        return len(self._attempts)

    def use(self, claims: Claims, now: float) -> None:
        """Use up a verified ticket.

        Raises:
            KvorumError: UNAUTHENTICATED with TICKET_INVALID when it was used before or has expired;
                RESOURCE_EXHAUSTED when too many that have not expired are remembered.
        """
        self._forgotten = max(self._forgotten, now - CLOCK_SKEW_S)
        while self._expiries and self._expiries[0][0] < self._forgotten:
            self._attempts.discard(heapq.heappop(self._expiries)[1])
        if claims.expires_at < self._forgotten:
            raise refusal("it has expired")
        if claims.attempt_id in self._attempts:
            raise refusal("it was used before: ask the router for another one")
        if len(self._attempts) >= self._most:
            raise KvorumError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                common_pb2.OVERLOADED,
                f"this replica remembers {self._most} used tickets and takes no more until some expire",
                retry_after_s=max(0.0, self._expiries[0][0] + CLOCK_SKEW_S - now),
            )
        self._attempts.add(claims.attempt_id)
        heapq.heappush(self._expiries, (claims.expires_at, claims.attempt_id))


class TicketCheck:
    """Verifies and uses up the tickets of one replica's epoch; what `channels.create_server` is given.

    Not safe to share between threads: meant for a server's event loop.
    """

    def __init__(
        self, secret: str, replica: str, epoch: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._secret, self._replica, self._epoch, self._clock = secret, replica, epoch, clock
        self.used = UsedTickets()

    def __call__(self, ticket: str, request: bytes) -> None:
        """Raises KvorumError as `verify` and `UsedTickets.use` do. `request` is as it came over the wire."""
        now = self._clock()
        claims = verify(
            ticket, self._secret, request=request, replica=self._replica, epoch=self._epoch, now=now
        )
        self.used.use(claims, now)


def refusal(why: str) -> KvorumError:
    """UNAUTHENTICATED with TICKET_INVALID."""
    message = f"the ticket in the metadata '{TICKET_KEY}' is refused: {why}"
    return KvorumError(grpc.StatusCode.UNAUTHENTICATED, common_pb2.TICKET_INVALID, message)


def _mac(secret: str, body: str) -> str:
    # HKDF's expansion (RFC 5869) to one block; its extraction is for secrets that are not uniform.
    key = hmac.digest(secret.encode(), _LABEL + b"\x01", "sha256")
    return _to_text(hmac.digest(key, body.encode(), "sha256"))


def _claims(body: str) -> Claims:
    """Of a body whose signature is right: anything odd about it comes from another version's router."""
    try:
        claims: Any = json.loads(_from_text(body))
        if claims[0] != _VERSION:
            raise refusal(f"it has version {claims[0]}, this replica knows {_VERSION}")
        _, replica, epoch, attempt_id, expires_at, digest = claims
        found = Claims(str(replica), str(epoch), str(attempt_id), float(expires_at), str(digest))
    except (ValueError, TypeError, LookupError, RecursionError):
        raise refusal("it is malformed") from None
    if not math.isfinite(found.expires_at):
        raise refusal("it is malformed")
    return found


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
