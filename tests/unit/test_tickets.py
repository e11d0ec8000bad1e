"""Tickets of lookaside streams: what is accepted, and what a refusal says."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2, tickets
from protos.errors import KvorumError
from protos.tickets import CLOCK_SKEW_S, MAX_LIFETIME_S, Claims, TicketCheck, UsedTickets, sign, verify

SECRET = "a" * 64
REQUEST = b"\x0a\x03abc"
NOW = 1_800_000_000.0
PLACE = {"replica": "replica-0", "epoch": "e1"}


def ticket(**changes: Any) -> str:
    claims = {**PLACE, "attempt_id": "attempt-1", "expires_at": NOW + 30, **changes}
    return sign(SECRET, REQUEST, **claims)


def checked(text: str, **changes: Any) -> Claims:
    how: dict[str, Any] = {"request": REQUEST, **PLACE, "now": NOW, **changes}
    return verify(text, how.pop("secret", SECRET), **how)


def refused(text: str, **changes: Any) -> str:
    with pytest.raises(KvorumError) as caught:
        checked(text, **changes)
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.reason == common_pb2.TICKET_INVALID
    return caught.value.message


def signed_as_is(body: bytes) -> str:
    text = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
    return f"{text}.{tickets._mac(SECRET, text)}"


names = st.text(min_size=1, max_size=40)


@given(
    replica=names, epoch=names, attempt=names, request=st.binary(max_size=200), lifetime=st.floats(0, 3600)
)
def test_a_ticket_says_what_was_signed(
    replica: str, epoch: str, attempt: str, request: bytes, lifetime: float
) -> None:
    text = sign(SECRET, request, replica=replica, epoch=epoch, attempt_id=attempt, expires_at=NOW + lifetime)
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    claims = verify(text, SECRET, request=request, replica=replica, epoch=epoch, now=NOW)
    assert (claims.replica, claims.epoch, claims.attempt_id) == (replica, epoch, attempt)
    assert claims.expires_at == NOW + lifetime


def test_neither_the_token_nor_its_key_is_in_a_ticket() -> None:
    body, _, signature = ticket().partition(".")
    assert len(ticket()) < 300
    for part in (body, signature):
        raw = tickets._from_text(part)
        assert SECRET.encode() not in raw
        assert bytes.fromhex(SECRET) not in raw
    assert signature != tickets._mac("b" * 64, body)


@given(at=st.integers(0, 10_000), character=st.sampled_from("AQg_-.=~\u00e9\n 0"), insert=st.booleans())
def test_a_ticket_with_any_character_changed_is_refused(at: int, character: str, insert: bool) -> None:
    good = ticket()
    at %= len(good) + 1
    bad = good[:at] + character + good[at + (not insert) :]
    if bad != good:
        assert "malformed" in (message := refused(bad)) or "not signed" in message


def test_another_spelling_of_the_same_signature_is_refused() -> None:
    good = ticket()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    signature = good.partition(".")[2]
    twins = [good[:-1] + character for character in alphabet]
    same = [t for t in twins if tickets._from_text(t.partition(".")[2]) == tickets._from_text(signature)]
    assert len(same) == 4
    assert all("not signed" in refused(twin) for twin in same if twin != good)


@pytest.mark.parametrize("text", ["", ".", "a", "a.b", "..", "a.b.c", "é.é", "\x00.\x00", "." + "A" * 43])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    assert "malformed" in (message := refused(text)) or "not signed" in message


def test_an_overlong_ticket_is_refused_unread() -> None:
    assert "at most 2048" in refused("A" * 5_000_000)


def test_another_clusters_ticket_is_refused() -> None:
    assert "not signed by a router of this cluster" in refused(ticket(), secret="b" * 64)
    assert "not signed" in refused(ticket(), secret="")


def test_a_ticket_is_good_until_its_expiry_and_the_allowance_for_clocks() -> None:
    assert checked(ticket(), now=NOW + 30 + CLOCK_SKEW_S).attempt_id == "attempt-1"
    assert "expired 5.5 s ago" in refused(ticket(), now=NOW + 30 + CLOCK_SKEW_S + 0.5)
    assert "longer than 3600 s" in refused(ticket(expires_at=NOW + MAX_LIFETIME_S + CLOCK_SKEW_S + 1))


def test_a_ticket_is_for_one_replica_one_epoch_and_one_request() -> None:
    assert "for replica 'replica-0', this is 'replica-1'" in refused(ticket(), replica="replica-1")
    assert "for epoch 'e1' of 'replica-0', which has restarted as 'e2'" in refused(ticket(), epoch="e2")
    assert "for another request" in refused(ticket(), request=REQUEST + b"\x00")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[2]", "version 2"),
        (b"[1]", "malformed"),
        (b"{}", "malformed"),
        (b"[]", "malformed"),
        (b"1", "malformed"),
        (b"\xff", "malformed"),
        (b"", "malformed"),
        (b'[1,"r","e","a",null,"h"]', "malformed"),
        (b'[1,"r","e","a",NaN,"h"]', "malformed"),
        (b"[" * 1400, "malformed"),
    ],
)
def test_a_well_signed_ticket_of_another_version_is_refused(body: bytes, words: str) -> None:
    assert words in refused(signed_as_is(body))


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": ""},
        {"epoch": ""},
        {"attempt_id": ""},
        {"expires_at": float("nan")},
        {"replica": "r" * 1600},
    ],
)
def test_what_could_not_be_verified_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ticket"):
        ticket(**changes)


def test_a_cluster_without_token_signs_nothing() -> None:
    with pytest.raises(ValueError, match="secret"):
        sign("", REQUEST, **PLACE, attempt_id="a", expires_at=NOW)


def test_a_ticket_is_used_once_and_by_nobody_when_refused() -> None:
    now = NOW
    check = TicketCheck(SECRET, **PLACE, clock=lambda: now)
    with pytest.raises(KvorumError, match="another request"):
        check(ticket(), b"other")
    check(ticket(), REQUEST)
    with pytest.raises(KvorumError, match="used before") as caught:
        check(ticket(), REQUEST)
    assert caught.value.reason == common_pb2.TICKET_INVALID
    check(ticket(attempt_id="attempt-2"), REQUEST)
    assert len(check.used) == 2
    now += 1000
    check(ticket(attempt_id="attempt-3", expires_at=now), REQUEST)
    assert len(check.used) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(-30, 60)), max_size=40))
def test_no_attempt_is_used_twice_however_the_clock_jumps(steps: list[tuple[int, int, int]]) -> None:
    used, now, passed = UsedTickets(), NOW, []
    expiries: dict[int, float] = {}
    for attempt, lifetime, jump in steps:
        now += jump
        expires_at = expiries.setdefault(attempt, now + lifetime)  # an attempt has one ticket
        with suppress(KvorumError):
            used.use(Claims("r", "e", str(attempt), expires_at, ""), now)
            passed.append(attempt)
    assert len(passed) == len(set(passed))


def test_used_tickets_are_bounded_and_say_when_to_come_back() -> None:
    used = UsedTickets(most=2)
    for attempt in ("a", "b"):
        used.use(Claims("r", "e", attempt, NOW + 10, ""), NOW)
    third = Claims("r", "e", "c", NOW + 60, "")
    with pytest.raises(KvorumError) as caught:
        used.use(third, NOW)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s == pytest.approx(10 + CLOCK_SKEW_S)
    used.use(third, NOW + 10 + CLOCK_SKEW_S + 0.1)
    assert len(used) == 1


def test_claims_are_a_list_in_json_that_a_person_can_read() -> None:
    claims = json.loads(tickets._from_text(ticket().partition(".")[0]))
    assert claims[:5] == [1, "replica-0", "e1", "attempt-1", NOW + 30]
