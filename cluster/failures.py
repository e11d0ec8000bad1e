"""How a command ends when it cannot do what was asked: one line a problem, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


class CommandError(Exception):
    """Each problem is one line that says what was attempted, with which value, and what to do."""

    exit_code = 1

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: Sequence[str] = problems


class RunFailed(CommandError):  # noqa: N818 - an outcome, not a kind of error
    """The request was sound; running it failed."""


class BadInput(CommandError):  # noqa: N818
    """The request cannot be carried out as written."""

    exit_code = 2


class ConfigError(BadInput):
    """A configuration file or flag is wrong; `problems` names every field that is."""
