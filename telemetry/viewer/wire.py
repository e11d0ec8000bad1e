"""How many parts a protobuf message has, before it is parsed: a body of empty ones grows eighty times.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
from typing import Any, Final

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_MORE: Final = 0x80


def fits(body: bytes, kind: Any, most: int) -> bool:
    """Whether an encoded message has at most `most` strings and messages in it, at all depths.

    `kind` is the message's descriptor. What is malformed fits: its parser will stop where this did.
    """
    at, left = 0, most
    ends, kinds = [len(body)], [_messages(kind)]
    try:
        while ends:
            if at >= ends[-1]:
                ends.pop()
                kinds.pop()
                continue
            tag, at = _number(body, at)
            wire = tag & 7
            if wire == _SIZED:
                size, at = _number(body, at)
                left -= 1
                if left < 0:
                    return False
                below = kinds[-1].get(tag >> 3)
                if below is None:
                    at += size
                else:
                    ends.append(at + size)
                    kinds.append(_messages(below))
            elif wire == _VARINT:
                _, at = _number(body, at)
            elif wire in {_FIXED64, _FIXED32}:
                at += 8 if wire == _FIXED64 else 4
            else:
                return True
    except IndexError:
        return True
    return True


@functools.cache
def _messages(kind: Any) -> dict[int, Any]:
    """The fields that are messages themselves, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _number(body: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends. Raises IndexError beyond the body."""
    value = body[at]
    at += 1
    if value < _MORE:
        return value, at
    value, shift = value & 0x7F, 7
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE or shift > 63:
            return value, at
        shift += 7
