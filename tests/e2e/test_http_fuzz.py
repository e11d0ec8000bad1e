"""Malformed requests: the HTTP face refuses them in OpenAI's shape, never with a 500, and goes on."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.conftest import RunningCluster
from tests.e2e.http_cases import CITY_FORMAT, MODEL, NAMED_TOOL, WEATHER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MESSAGES = [{"role": "user", "content": "Hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/tokenize": {"model": MODEL, "prompt": "Hi"},
    "/detokenize": {"model": MODEL, "tokens": [504]},
}
HOW_MANY = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"}
EDGES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, float("nan"), float("inf"), 0.5, "", "x",
    "\x00", "\ud800", "🦊" * 40, [], [[]], [None], {}, {"type": "json_object"}, {"a": {"b": [1]}},
    [5, 49152], [-1], CITY_FORMAT, [WEATHER], NAMED_TOOL, "required",
    {"regex": "("}, {"json": {"$ref": "#"}}, {"choice": []},
    [{"role": "user"}], [{"role": "x", "content": "y"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
]  # fmt: skip
KEYS = st.sampled_from(["type", "role", "content", "name", "function", "json_schema", "schema", "text", "x"])
JSON = st.recursive(
    st.sampled_from(EDGES) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
FEW = st.sampled_from([-1, 0, 1, 2, 1.5, "x", [], {}, True, -(2**63)])
"""A mutated count stays small, so that a request which is sound after all ends soon."""


def fields_of(openapi: dict[str, Any], path: str) -> set[str]:
    """What the request body of this path may have, by the server's own description."""
    body = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = openapi["components"]["schemas"]
    kinds = [schemas[kind["$ref"].rsplit("/", 1)[1]] for kind in body.get("anyOf", [body])]
    return {name for kind in kinds for name in kind["properties"]}


@st.composite
def mutated(draw: st.DrawFn, path: str, fields: list[str]) -> dict[str, Any]:
    """A sound body with some fields replaced, added or left out."""
    body = dict(VALID[path])
    for name in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4, unique=True)):
        body[name] = draw(FEW if name in HOW_MANY else st.sampled_from(EDGES) | JSON)
    if draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    return body


FUZZ = settings(
    max_examples=int(os.environ.get("KVORUM_FUZZ_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def http(web: RunningCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=web.http_url, timeout=180) as opened:
        yield opened
        answer = opened.post("/v1/completions", json=VALID["/v1/completions"])
        assert answer.status_code == 200, "it serves no more"


def assert_honest(answer: httpx.Response) -> None:
    """Success, or a refusal that blames the request, in the shape of the API it came by."""
    sent = f"{answer.request.url.path} {answer.request.content[:2000]!r}"
    what = f"{sent}: {answer.status_code} {answer.text[:1000]}"
    assert answer.status_code < 500 or answer.status_code == 501, what
    assert "Traceback" not in answer.text, what
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"], what
        assert isinstance(error["type"], str), what
        if not answer.request.url.path.startswith("/v1/messages"):
            assert error["code"] == answer.status_code, what
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        for line in answer.text.splitlines():
            assert '"code":500' not in line.replace(" ", ""), what


@pytest.mark.parametrize("path", VALID)
def test_fields_of_any_kind_and_value_are_never_a_500(http: httpx.Client, path: str) -> None:
    fields = fields_of(http.get("/openapi.json").json(), path)
    assert fields >= VALID[path].keys()

    @FUZZ
    @given(mutated(path, sorted(fields)))
    def send(body: dict[str, Any]) -> None:
        content = json.dumps(body)  # NaN and lone surrogates go through as Python writes them
        assert_honest(http.post(path, content=content, headers={"Content-Type": "application/json"}))

    send()


@pytest.mark.parametrize(
    "path", [*VALID, "/v1/chat/completions/batch", "/generative_scoring", "/v1/systemone"]
)
@pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=lambda mode: mode.value)
def test_what_its_own_description_allows_and_forbids_is_never_a_500(
    http: httpx.Client, path: str, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())

    @settings(FUZZ, max_examples=40)
    @given(schema[path]["POST"].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        body: Any = case.body
        if isinstance(body, dict):  # else nearly all name a model that there is not, or run for a minute
            few = {"max_tokens": 1, "max_output_tokens": 1}
            # A null there means no limit: a whole context takes longer than the client waits.
            body = few | {name: value for name, value in body.items() if name not in few or value is not None}
            if mode is schemathesis.GenerationMode.POSITIVE:
                body |= {"model": MODEL} | few
        content = body if isinstance(body, bytes) else json.dumps(body)
        assert_honest(http.post(path, content=content, headers={"Content-Type": "application/json"}))

    send()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", VALID)
def test_null_in_any_field_is_no_500(http: httpx.Client, path: str, stream: bool) -> None:
    fields = fields_of(http.get("/openapi.json").json(), path) - {"stream"}
    for name in sorted(fields - VALID[path].keys()):
        assert_honest(http.post(path, json=VALID[path] | {"stream": stream, name: None}))


@pytest.mark.parametrize("name", ["background", "truncation"])
@pytest.mark.parametrize("stream", [False, True])
def test_null_where_vllms_own_answer_has_none_means_the_default(
    http: httpx.Client, name: str, stream: bool
) -> None:
    answer = http.post("/v1/responses", json=VALID["/v1/responses"] | {name: None, "stream": stream})
    assert answer.status_code == 200, answer.text


BODIES = {
    "empty": b"",
    "half an object": b'{"model": "smollm2", "prompt": ',
    "null": b"null",
    "a list": b"[]",
    "a string": b'"prompt"',
    "a number": b"1",
    "no JSON": b"prompt=Hi&max_tokens=1",
    "invalid UTF-8": b'{"model": "smollm2", "prompt": "\xff\xfe"}',
    "UTF-16": '{"model": "smollm2", "prompt": "Hi", "max_tokens": 1}'.encode("utf-16"),
    "UTF-8 with a byte order mark": b"\xef\xbb\xbf" + json.dumps(VALID["/v1/completions"]).encode(),
    "a lone surrogate": rb'{"model": "smollm2", "prompt": "\ud800", "max_tokens": 1}',
    "NUL bytes": b"\x00" * 64,
    "nested a hundred thousand deep": b"[" * 100_000,
    "nested deep inside a field": b'{"model": "smollm2", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "a number of ten thousand digits": b'{"model": "smollm2", "prompt": "Hi", "seed": '
    + b"9" * 10_000
    + b"}",
    "a field given twice": b'{"model": "gpt-9", "model": "smollm2", "prompt": "Hi", "max_tokens": 1}',
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    assert_honest(http.post(path, content=body, headers={"Content-Type": "application/json"}))


HEADERS = {
    "a long request id": {"X-Request-Id": "x" * 5000},
    "a request id past ASCII": {"X-Request-Id": b"\xff\xfe id"},
    "an empty request id": {"X-Request-Id": ""},
    "a broken traceparent": {"traceparent": "00-zz-zz-zz"},
    "a traceparent of zeros": {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    "a broken tracestate": {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "=,=,="},
    "a long session": {"X-Session-Id": "s" * 5000},
    "a session past ASCII": {"X-Session-Id": "Zażółć".encode()},
    "a tenant past ASCII": {"X-Tenant-Id": b"\xf0\x9f\xa6\x8a"},
    "an unknown service class": {"X-Service-Class": "first"},
    "a priority that is no number": {"X-Vllm-Priority": "soon"},
    "another content type": {"Content-Type": "text/plain"},
    "a content type that is none": {"Content-Type": "/,;;="},
    "a charset that there is not": {"Content-Type": "application/json; charset=klingon"},
    "a content encoding that was not used": {"Content-Encoding": "gzip"},
    "a key that is none": {"Authorization": "Bearer"},
    "a scheme that is none": {"Authorization": "Basic"},
    "an accept that nothing meets": {"Accept": "image/png"},
    "many headers": {f"X-Filler-{i}": "x" * 100 for i in range(80)},
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
def test_a_malformed_header_is_no_500(http: httpx.Client, headers: dict[str, Any]) -> None:
    sent = {"Content-Type": "application/json"} | headers
    assert_honest(http.post("/v1/completions", content=json.dumps(VALID["/v1/completions"]), headers=sent))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/no/such/path", 404),
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", "/v1/responses/resp_none", 404),
    ],
)
def test_a_path_or_method_that_there_is_not_is_told_in_openais_shape(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert_honest(answer)
    assert answer.status_code == status


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"BLUB\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nBad Header: a\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \x7f\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_end_that_connection_alone(
    web: RunningCluster, http: httpx.Client, sent: bytes
) -> None:
    url = httpx.URL(web.http_url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(65536)
    assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5"))


def test_a_body_past_the_limit_is_refused_before_it_is_parsed(http: httpx.Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * (33 * 2**20)})
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert_honest(answer)
    assert answer.status_code == 413
