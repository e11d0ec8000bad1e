"""JSON that comes as text in a field of a request: order of keys kept, 1 and 1.0 told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from protos.errors import invalid

MAX_NESTING = 64
"""Levels of objects and arrays; vLLM's MAX_STRUCTURED_OUTPUT_JSON_NESTING."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`; `field` is its path in the proto.

    Raises:
        KvorumError: INVALID_ARGUMENT naming `field`: not JSON (NaN and Infinity are not), not an
            object, nested deeper than MAX_NESTING, an integer beyond Python's limit on digits, or
            half of a surrogate pair, which no tokenizer takes.
    """
    try:
        value = _load(field, text, _refuse_constant)
    except json.JSONDecodeError as error:
        raise invalid(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(field, f"must be a JSON object, got {type(value).__name__}")
    return value


def parse_arguments(field: str, text: str) -> dict[str, Any]:
    """The arguments of an earlier tool call, {} where they are no JSON object.

    That is how vLLM reads them, NaN included: a model wrote them, and refusing here would refuse every
    later turn of the conversation too.

    Raises:
        KvorumError: as `parse_object`, for what is JSON but beyond its bounds.
    """
    try:
        value = _load(field, text, None)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _load(field: str, text: str, constant: Callable[[str], Any] | None) -> Any:
    too_deep = f"nests deeper than {MAX_NESTING} levels"
    try:
        value = json.loads(text, parse_constant=constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise invalid(field, too_deep) from None
    except ValueError as error:
        raise invalid(field, f"cannot be read: {error}") from None
    if _nests_deeper(value, MAX_NESTING):
        raise invalid(field, too_deep)
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid(field, "a string in it holds half of a surrogate pair") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _nests_deeper(document: Any, most: int) -> bool:
    """Whether objects and arrays nest more than `most` levels; breadth first, so without recursion."""
    level = [document]
    for _ in range(most):
        children = (n.values() if isinstance(n, dict) else n for n in level if isinstance(n, dict | list))
        level = [child for group in children for child in group if isinstance(child, dict | list)]
        if not level:
            return False
    return True
