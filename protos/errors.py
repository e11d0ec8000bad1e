"""Rich gRPC errors: one way to refuse, used by every server, and one way to read a refusal.

Every error carries `google.rpc.ErrorInfo{reason, domain="kvorum"}` where reason is a name of
`protos.common_pb2.Reason`; field errors add `BadRequest`, retryable ones `RetryInfo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos import common_pb2

DOMAIN = "kvorum"
GAVE_UP = "attempts"
"""In an error's metadata: how many replicas a router tried in vain."""


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that is out of range; `field` is its path in the proto."""

    field: str
    description: str


# Not frozen: the interpreter and contextlib set __traceback__ and __cause__ on exceptions.
@dataclass(eq=False)
class KvorumError(Exception):
    """A refusal or failure with everything a client needs to act on it.

    `retry_after_s` becomes RetryInfo; `violations` become BadRequest.
    """

    code: grpc.StatusCode
    reason: common_pb2.Reason.ValueType
    message: str
    violations: Sequence[FieldViolation] = ()
    retry_after_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.code, self.reason, self.message, self.violations, self.retry_after_s, self.metadata)
        return (type(self), arguments)


def invalid(
    field_path: str,
    description: str,
    reason: common_pb2.Reason.ValueType = common_pb2.INVALID_REQUEST,
) -> KvorumError:
    """INVALID_ARGUMENT for one field."""
    violation = FieldViolation(field_path, description)
    message = f"{field_path}: {description}"
    return KvorumError(grpc.StatusCode.INVALID_ARGUMENT, reason, message, (violation,))


_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def is_refusal(error: KvorumError) -> bool:
    """Turned away as designed, for what was asked or how much there was; any other error is a failure."""
    return error.code in _REFUSALS


def refused_by_grpc(error: KvorumError) -> bool:
    """RESOURCE_EXHAUSTED that tells of no load: gRPC found a message too large, and will again."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason == common_pb2.INTERNAL


def to_status(error: KvorumError) -> grpc.Status:
    """The grpc.Status to abort a call with."""
    info = error_details_pb2.ErrorInfo(
        reason=common_pb2.Reason.Name(error.reason), domain=DOMAIN, metadata=error.metadata
    )
    details = [_packed(info)]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(_packed(bad))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(retry))
    code = int(code_pb2.Code.Value(error.code.name))
    status = status_pb2.Status(code=code, message=error.message, details=details)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


def from_rpc_error(error: grpc.RpcError) -> KvorumError:
    """Read an error back from a call; one that is not ours keeps its code and gets a best-fitting reason."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    code, message = error.code(), error.details() or ""
    reason = _reason_for_foreign(code)
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    metadata: dict[str, str] = {}
    for detail in _details(error):
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            if info.domain == DOMAIN and info.reason in common_pb2.Reason.keys():  # noqa: SIM118 (an enum wrapper)
                reason = common_pb2.Reason.Value(info.reason)
                metadata = dict(info.metadata)
        elif detail.Unpack(bad):
            violations = [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return KvorumError(code, reason, message, tuple(violations), retry_after_s, metadata)


def _details(error: Any) -> Sequence[any_pb2.Any]:
    try:
        status = rpc_status.from_call(_CallView(error))
    except ValueError:  # the status in the trailers contradicts the call's: believe the call
        return ()
    return () if status is None else tuple(status.details)


class _CallView:
    """An error as `rpc_status.from_call` expects a call: trailing metadata never None."""

    def __init__(self, error: Any) -> None:
        self._error = error
        self.code = error.code
        self.details = error.details

    def trailing_metadata(self) -> list[tuple[str, Any]]:
        return list(self._error.trailing_metadata() or ())


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _reason_for_foreign(code: grpc.StatusCode) -> common_pb2.Reason.ValueType:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return common_pb2.DEADLINE_EXCEEDED
    if code is grpc.StatusCode.UNAVAILABLE:
        return common_pb2.REPLICA_LOST
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return common_pb2.UNAUTHENTICATED
    return common_pb2.INTERNAL
