"""Each refusal of a router becomes the HTTP status that a client of the OpenAI API can act on."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import grpc
import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from cluster.openai.refusals import Refused, openai_name, to_exception
from protos import common_pb2
from protos.errors import KvorumError, invalid

Code = grpc.StatusCode


def shape(error: KvorumError) -> Any:
    """The `error` object of vLLM's answer."""
    return create_error_response(to_exception(error)).error


@pytest.mark.parametrize(
    ("code", "reason", "more", "status"),
    [
        (Code.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, {"retry_after_s": 2.5}, 429),
        (Code.UNAVAILABLE, common_pb2.NO_REPLICA_READY, {"retry_after_s": 1.0}, 503),
        (Code.UNAVAILABLE, common_pb2.ROUTER_DRAINING, {}, 503),
        (Code.UNAVAILABLE, common_pb2.REPLICA_DRAINING, {"retry_after_s": 1.0}, 503),
        (
            Code.UNAVAILABLE,
            common_pb2.REPLICA_LOST,
            {"retry_after_s": 1.0, "metadata": {"attempts": "3"}},
            503,
        ),
        (Code.UNAVAILABLE, common_pb2.REPLICA_LOST, {"metadata": {"replica": "r0", "epoch": "e"}}, 502),
        (Code.DEADLINE_EXCEEDED, common_pb2.DEADLINE_EXCEEDED, {}, 504),
        (Code.UNAUTHENTICATED, common_pb2.UNAUTHENTICATED, {}, 401),
        (Code.INTERNAL, common_pb2.INTERNAL, {}, 500),
        (Code.UNIMPLEMENTED, common_pb2.INTERNAL, {}, 501),
        (Code.FAILED_PRECONDITION, common_pb2.FEATURE_NOT_ENABLED, {}, 501),
        (Code.CANCELLED, common_pb2.INTERNAL, {}, 503),
        (Code.DATA_LOSS, common_pb2.INTERNAL, {}, 500),
    ],
)
def test_each_reason_has_its_status(code: Any, reason: Any, more: dict[str, Any], status: int) -> None:
    error = KvorumError(code, reason, "what happened", **more)
    refused = to_exception(error)
    assert isinstance(refused, Refused)
    assert refused.http_status == status
    assert refused.reason == common_pb2.Reason.Name(reason)
    assert refused.retry_after_s == more.get("retry_after_s")
    assert shape(error).code == status


def test_the_field_at_fault_is_named_as_the_openai_api_names_it() -> None:
    refused = to_exception(invalid("sampling.top_p", "must be in (0, 1], got 2"))
    assert isinstance(refused, VLLMValidationError)
    answer = shape(invalid("sampling.top_p", "must be in (0, 1], got 2"))
    assert (answer.code, answer.param, answer.type) == (400, "top_p", "BadRequestError")
    assert "top_p: must be in (0, 1], got 2" in answer.message
    assert "sampling." not in answer.message


def test_a_refusal_without_a_field_names_none() -> None:
    answer = shape(KvorumError(Code.INVALID_ARGUMENT, common_pb2.INVALID_REQUEST, "no"))
    assert (answer.code, answer.param, answer.message) == (400, None, "no")
    answer = shape(invalid("sampling", "these two exclude each other"))
    assert (answer.param, answer.message) == (None, "these two exclude each other")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.temperature", "temperature"),
        ("sampling.stop[3]", "stop"),
        ("sampling.include_stop_in_output", "include_stop_str_in_output"),
        ("sampling.structured", "response_format"),
        ("sampling.structured.json_schema", "response_format"),
        ("sampling.structured.structural_tag", "response_format"),
        ("sampling.structured.regex", "structured_outputs"),
        ("sampling.structured.choice[1]", "structured_outputs"),
        ("sampling.engine_json", "vllm_xargs"),
        ("sampling.reasoning_parser_kwargs_json", "chat_template_kwargs"),
        ("sampling.logprob_token_ids", "logprob_token_ids"),
        ("sampling", None),
        ("options.cache_salt", "cache_salt"),
        ("options.session", "session_id"),
        ("options.lora", "model"),
        ("model", "model"),
        ("tokens.ids", "prompt"),
        ("prompt_token_ids", "prompt"),
        ("chat.messages[0].role", "prompt"),
        ("text", "prompt"),
    ],
)
def test_names_of_fields(field: str, name: str | None) -> None:
    assert openai_name(field) == name


def test_an_unknown_model_is_not_found() -> None:
    error = KvorumError(Code.NOT_FOUND, common_pb2.MODEL_NOT_FOUND, "no model 'x'; there is: m")
    assert isinstance(to_exception(error), VLLMNotFoundError)
    assert (shape(error).code, shape(error).message) == (404, "no model 'x'; there is: m")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.UNAVAILABLE, common_pb2.REPLICA_LOST),  # as `from_rpc_error` reads gRPC's own
        (Code.CANCELLED, common_pb2.INTERNAL),
        (Code.UNKNOWN, common_pb2.INTERNAL),
        (Code.RESOURCE_EXHAUSTED, common_pb2.INTERNAL),  # a message that gRPC finds too large
    ],
)
def test_what_strangers_wrote_stays_in_the_log(
    code: Any, reason: Any, caplog: pytest.LogCaptureFixture
) -> None:
    error = KvorumError(code, reason, "ipv4:10.0.0.7:50051: Traceback KeyError('secret')")
    refused = to_exception(error)
    assert isinstance(refused, Refused)
    assert "10.0.0.7" not in str(refused)
    assert "secret" not in str(refused)
    assert "secret" in caplog.text
    assert refused.http_status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR)


def test_a_message_too_large_for_grpc_is_no_reason_to_come_back() -> None:
    error = KvorumError(Code.RESOURCE_EXHAUSTED, common_pb2.INTERNAL, "Received message larger than max")
    assert shape(error).code == 500
