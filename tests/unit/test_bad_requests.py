"""Settings and requests that make no sense are refused by name, at the edge."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest
from fakes_router import (
    assert_nothing_leaked,
    collected,
    refused,
    running_stack,
)
from pydantic import ValidationError

from protos.errors import KvorumError
from router.config import RouterConfig


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "best"},
        {"max_wait_ms": -1},
        {"max_batch_tokens": 0},
        {"near_tie_ms": -0.1},
        {"harm_weight": -1},
        {"affinity_ms": float("nan")},
        {"affinity_ms": float("inf")},
        {"near_tie_percent": 101},
        {"max_queue": 0},
        {"ticket_s": 0},
        {"weight": 3},
    ],
    ids=str,
)
def test_setting_that_makes_no_sense_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RouterConfig(**settings)
    assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize("field", ["session", "tenant", "cache_salt", "request_id"])
async def test_megabyte_of_a_name_is_refused_and_not_kept(field: str) -> None:
    async with running_stack() as stack:
        error = await refused(collected(stack.client, [1], **{field: "x" * 1_000_000}))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.violations[0].field == f"options.{field}"
        assert len(error.message) < 1000
        with suppress(KvorumError):
            await stack.client.explain([1], **{field: "x" * 1_000_000})
        await assert_nothing_leaked(stack.server)


async def test_unknown_service_class_is_refused_with_those_there_are() -> None:
    async with running_stack() as stack:
        error = await refused(collected(stack.client, [1], service_class=7))
    assert error.violations[0].field == "options.service_class"
    assert "BATCH" in error.message
