"""What went wrong, in the shapes that HTTP clients expect."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from http import HTTPStatus


class IngressError(Exception):
    """The HTTP face cannot be started as configured; the message says what to change."""


class Api(enum.Enum):
    """Whose conventions a path follows."""

    OPENAI = "openai"
    RESPONSES = "responses"  # OpenAI's, with typed events
    ANTHROPIC = "anthropic"

    @classmethod
    def of(cls, path: str) -> Api:
        """By the path of the request."""
        if path.startswith("/v1/messages"):
            return cls.ANTHROPIC
        return cls.RESPONSES if path.startswith("/v1/responses") else cls.OPENAI


# https://docs.claude.com/en/api/errors
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True)
class HttpFailure:
    """One refusal or failure. `kind` is OpenAI's error type as vLLM names it, `param` the field at fault."""

    status: int
    message: str
    kind: str = ""
    param: str | None = None

    def body(self, api: Api) -> bytes:
        """The JSON document that answers with it."""
        return json.dumps(self._plain(api), ensure_ascii=False).encode("utf-8", "replace")

    def event(self, api: Api, sequence_number: int = 0) -> bytes:
        """The server-sent event that ends a stream with it; the number is that of the Responses API."""
        if api is Api.RESPONSES:
            fields = {
                "type": "error",
                "code": str(self.status),
                "message": self.message,
                "param": self.param,
                "sequence_number": sequence_number,
            }
            data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
        else:
            data = self.body(api)
        name = b"" if api is Api.OPENAI else b"event: error\n"
        return name + b"data: " + data + b"\n\n"

    def _plain(self, api: Api) -> dict[str, object]:
        if api is Api.ANTHROPIC:
            default = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, default)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = self.kind or _phrase(self.status)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.status},
        }


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
