"""Answers of an HTTP server as plain values, streams put together, and what differs between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

EXCEPT = {
    "id": "made up for each answer",
    "item_id": "made up for each answer",
    "call_id": "made up for each answer",
    "request_id": "made up for each answer",
    "created": "time of the answer",
    "created_at": "time of the answer",
    "completed_at": "time of the answer",
    "sequence_number": "counts the pieces, which come as fast as they are made and as the client reads",
    "system_fingerprint": "hash of the server's whole configuration, its executor and paths among it",
    "root": "path of the checkpoint on the server's machine",
}
"""Fields that may differ, and why; every other field of an answer must be the same on both sides."""

_GROWS = {"content", "text", "arguments", "reasoning", "delta", "partial_json", "thinking", "tool_plan"}
"""Strings that a stream sends piece by piece; of any other the last one sent counts."""

_APART = ("type", "object", "index", "output_index", "content_index", "item_id")
"""Neighbouring pieces that agree in all of these belong to one part of the answer."""

_CLOSE = 1e-3
"""Of a log probability: the same sums in another order, in float32."""


def whole(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces of a stream, neighbours of one kind put together: how it was cut does not show."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if parts and all(parts[-1].get(key) == piece.get(key) for key in _APART):
            parts[-1] = _join(parts[-1], piece, "")
        else:
            parts.append(piece)
    return parts


def differences(got: Any, expected: Any, at: str = "answer") -> list[str]:
    """One line for each place where they differ, fields of EXCEPT aside; empty: they are the same."""
    if isinstance(got, dict) and isinstance(expected, dict):
        found = []
        for key in sorted(got.keys() | expected.keys()):
            if key in EXCEPT:
                continue
            if key not in got or key not in expected:
                side = "only in ours" if key in got else "missing in ours"
                found.append(f"{at}.{key}: {side}: {(got | expected)[key]!r}")
            else:
                found += differences(got[key], expected[key], f"{at}.{key}")
        return found
    if isinstance(got, list) and isinstance(expected, list):
        if len(got) != len(expected):
            return [f"{at}: {len(got)} items, not {len(expected)}: {got!r} != {expected!r}"]
        pairs = enumerate(zip(got, expected, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{at}[{i}]")]
    same = _close(got, expected) if isinstance(got, float) or isinstance(expected, float) else got == expected
    return [] if same and _kind(got) == _kind(expected) else [f"{at}: {got!r} != {expected!r}"]


def _close(got: Any, expected: Any) -> bool:
    numbers = isinstance(got, int | float) and isinstance(expected, int | float)
    return numbers and math.isclose(got, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _join(old: Any, new: Any, key: str) -> Any:
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: _join(old.get(name), new.get(name), name) for name in (old | new)}
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(item, dict) and "index" in item for item in old + new):
            return _join_by_index(old, new)
        return old + new
    if isinstance(old, str) and isinstance(new, str) and key in _GROWS:
        return old + new
    return new


def _join_by_index(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_index = {item["index"]: item for item in old}
    for item in new:
        by_index[item["index"]] = _join(by_index.get(item["index"]), item, "")
    return [by_index[index] for index in sorted(by_index)]
