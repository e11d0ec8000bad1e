"""What a router refused, as the exception for which vLLM's API server has an answer in OpenAI's shape."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus

import grpc
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError

from protos import common_pb2
from protos.errors import FieldViolation, KvorumError, refused_by_grpc

log = logging.getLogger(__name__)

_STATUS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.CANCELLED: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
}

_OPENAI_NAMES = {
    "include_stop_in_output": "include_stop_str_in_output",
    "structured": "response_format",
    "engine_json": "vllm_xargs",
    "reasoning_parser_kwargs_json": "chat_template_kwargs",
    "session": "session_id",
    "lora": "model",
}
"""Names of the API's fields where they differ from the proto's."""

_PROMPT = ("text", "tokens", "chat", "prompt_token_ids")
_CONSTRAINTS = ("regex", "choice", "grammar")
"""Kinds of StructuredOutput that OpenAI's response_format has no words for: vLLM's structured_outputs."""


class Refused(GracefulHTTPError):  # noqa: N818 - a refusal is an answer, not a fault
    """An honest HTTP status that is no fault of the request's content.

    `retry_after_s` is when to come back, None when unknown; `reason` a name of `common_pb2.Reason`.
    """

    def __init__(
        self, message: str, status: HTTPStatus, *, retry_after_s: float | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, status)
        self.retry_after_s = retry_after_s
        self.reason = reason


def to_exception(error: KvorumError) -> Exception:
    """VLLMValidationError (400), VLLMNotFoundError (404), or Refused with the status that fits.

    Nothing that a stranger's exception or gRPC itself wrote reaches the client: it is logged.
    """
    if error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        refusal: Exception = _invalid(error)
    elif error.code is grpc.StatusCode.NOT_FOUND:
        refusal = VLLMNotFoundError(error.message)
    else:
        refusal = _refused(error)
    return refusal


def openai_name(field: str) -> str | None:
    """What the OpenAI API calls the field at this path of the proto; None where it has no single field."""
    head, _, rest = field.partition(".")
    if head in _PROMPT:
        return "prompt"
    if head in ("sampling", "options"):
        name, _, kind = rest.partition(".")
        if name == "structured" and re.split(r"\W", kind)[0] in _CONSTRAINTS:
            return "structured_outputs"
    else:
        name = head
    name = name.split("[")[0]
    return _OPENAI_NAMES.get(name, name) or None


def _invalid(error: KvorumError) -> VLLMValidationError:
    if not error.violations:
        return VLLMValidationError(error.message)
    first: FieldViolation = error.violations[0]
    name = openai_name(first.field)
    return VLLMValidationError(f"{name}: {first.description}" if name else first.description, parameter=name)


def _refused(error: KvorumError) -> Refused:
    return Refused(
        _message(error),
        _status(error),
        retry_after_s=error.retry_after_s,
        reason=common_pb2.Reason.Name(error.reason),
    )


def _status(error: KvorumError) -> HTTPStatus:
    if error.reason == common_pb2.FEATURE_NOT_ENABLED:
        return HTTPStatus.NOT_IMPLEMENTED
    if refused_by_grpc(error):
        return HTTPStatus.INTERNAL_SERVER_ERROR
    if _broken_midway(error):
        return HTTPStatus.BAD_GATEWAY
    return _STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def _broken_midway(error: KvorumError) -> bool:
    """Whether a replica was lost that had begun to answer; one lost before leaves the request as it was."""
    return error.reason == common_pb2.REPLICA_LOST and "replica" in error.metadata


def _message(error: KvorumError) -> str:
    if _from_grpc(error):
        log.warning("the connection to a router failed: %s", error)
        return "the router could not be reached, or its connection broke; send the request again"
    if error.code is grpc.StatusCode.CANCELLED:
        log.warning("a router cancelled a request: %s", error)
        return "the router ended this request; send it again"
    if refused_by_grpc(error):
        log.error("a message between servers of the cluster was refused by gRPC: %s", error)
        return "this request or its answer is too large for the cluster"
    if error.code is grpc.StatusCode.UNKNOWN:
        log.error("a router failed: %s", error)
        return "the router failed on this request"
    return error.message


def _from_grpc(error: KvorumError) -> bool:
    """UNAVAILABLE that no server of ours sent: ours say when to come back, or which replica was lost."""
    return (
        error.code is grpc.StatusCode.UNAVAILABLE
        and error.reason == common_pb2.REPLICA_LOST
        and error.retry_after_s is None
        and not error.metadata
    )
