"""Bad input over the wire: a precise status, the field that is wrong, and a cluster that goes on."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos import common_pb2
from protos.common_pb2 import StructuredOutput
from protos.errors import KvorumError
from router.client import KvorumClient
from tests.e2e.conftest import collect

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
HELLO = "Hello"


def _structured(**constraint: Any) -> dict[str, Any]:
    return {"structured": StructuredOutput(**constraint)}


@pytest.mark.parametrize(
    ("prompt", "arguments", "code", "field"),
    [
        pytest.param(HELLO, {"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, None, id="unknown model"),
        pytest.param("", {}, INVALID, "text", id="empty text"),
        pytest.param([], {}, INVALID, "tokens.ids", id="no token ids"),
        pytest.param([5, 49152], {}, INVALID, "tokens.ids", id="token id out of vocabulary"),
        pytest.param([-1], {}, INVALID, "tokens.ids", id="negative token id"),
        pytest.param([7] * 5000, {}, INVALID, "tokens.ids", id="longer than the context"),
        pytest.param("word " * 6000, {}, INVALID, "text", id="text longer than the context"),
        pytest.param(HELLO, {"max_tokens": 5000}, INVALID, "sampling.max_tokens", id="max_tokens too large"),
        pytest.param(HELLO, {"max_tokens": 0}, INVALID, "sampling.max_tokens", id="max_tokens zero"),
        pytest.param(
            HELLO, {"temperature": -1.0}, INVALID, "sampling.temperature", id="negative temperature"
        ),
        pytest.param(
            HELLO, {"temperature": float("nan")}, INVALID, "sampling.temperature", id="temperature NaN"
        ),
        pytest.param(HELLO, {"top_p": 0.0}, INVALID, "sampling.top_p", id="top_p zero"),
        pytest.param(HELLO, {"n": 17}, INVALID, "sampling.n", id="n over the limit"),
        pytest.param(HELLO, {"logprobs": 1000}, INVALID, "sampling.logprobs", id="too many logprobs"),
        pytest.param(HELLO, {"lora": "no-such"}, grpc.StatusCode.NOT_FOUND, None, id="unknown adapter"),
        pytest.param(HELLO, _structured(regex="(unclosed"), INVALID, "sampling.structured", id="bad regex"),
        pytest.param(
            HELLO, _structured(json_schema="{not json"), INVALID, "sampling.structured", id="schema not JSON"
        ),
        pytest.param(
            HELLO,
            _structured(json_schema='{"type": "nonsense"}'),
            INVALID,
            "sampling.structured",
            id="bad schema",
        ),
        pytest.param(
            HELLO, _structured(grammar="root ::= ("), INVALID, "sampling.structured", id="bad grammar"
        ),
    ],
)
async def test_bad_input_is_refused_precisely(
    client: KvorumClient, prompt: Any, arguments: dict[str, Any], code: grpc.StatusCode, field: str | None
) -> None:
    with pytest.raises(KvorumError) as refused:
        await collect(client, prompt, timeout=60, **({"max_tokens": 4} | arguments))
    assert refused.value.code is code
    assert "Traceback" not in refused.value.message
    if field is None:
        assert refused.value.reason in (common_pb2.MODEL_NOT_FOUND, common_pb2.LORA_NOT_FOUND)
    else:
        assert any(violation.field.startswith(field) for violation in refused.value.violations), refused.value

    after = await collect(client, HELLO, max_tokens=2, temperature=0)
    assert after.tokens[0]


@pytest.mark.parametrize("schema", ['{"$ref": "#"}', '{"allOf": [{"$ref": "#"}]}'])
async def test_a_constraint_the_engine_cannot_compile_is_no_success(
    client: KvorumClient, schema: str
) -> None:
    with pytest.raises(KvorumError) as refused:
        await collect(
            client, HELLO, max_tokens=4, timeout=60, structured=StructuredOutput(json_schema=schema)
        )
    assert refused.value.code is INVALID
    assert refused.value.violations[0].field == "sampling.structured"


async def test_nested_groups_that_crash_the_grammar_compiler_do_not_reach_it(client: KvorumClient) -> None:
    pattern = "(" * 50_000 + "a" + ")" * 50_000
    for constraint in ({"json_schema": f'{{"type": "string", "pattern": "{pattern}"}}'}, {"regex": pattern}):
        with pytest.raises(KvorumError) as refused:
            await collect(client, HELLO, max_tokens=4, structured=StructuredOutput(**constraint))
        assert refused.value.code is INVALID
    assert (await collect(client, HELLO, max_tokens=2)).tokens[0]


async def test_an_unknown_model_is_answered_with_those_there_are(client: KvorumClient) -> None:
    with pytest.raises(KvorumError, match="smollm2"):
        await collect(client, HELLO, model="gpt-9")


async def test_a_role_the_template_does_not_know_does_not_break_the_router(client: KvorumClient) -> None:
    with pytest.raises(KvorumError) as refused:
        await collect(client, messages=[{"role": "no-such-role", "content": "Hi"}], max_tokens=2)
    assert refused.value.code is INVALID
    assert refused.value.violations[0].field.startswith("chat.messages")
    assert (await collect(client, HELLO, max_tokens=2)).tokens[0]
