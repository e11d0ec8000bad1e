"""Text of unknown origin made safe for a terminal or a log line."""

from __future__ import annotations


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line, with everything a terminal might act on shown as an escape.

    Control and format characters (escape sequences, newlines, bidirectional overrides) and lone
    surrogates become backslash escapes. More than `limit` characters are cut, marked by an ellipsis.
    """
    if limit is not None and len(text) > limit:
        text = text[: max(limit - 1, 0)] + "…"
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in text)
