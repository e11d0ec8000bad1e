"""Ray's errors, in words for people."""

from __future__ import annotations

_LONGEST = 400


def last_line(error: BaseException) -> str:
    """Ray wraps a remote traceback in the message; its last line is what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_LONGEST]
