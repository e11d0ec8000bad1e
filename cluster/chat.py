"""The interactive conversation of `kvorum chat`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import click

from cluster.connect import Target, as_command_error
from cluster.reply import Reply
from protos.errors import KvorumError

_HELP = "/reset starts over · /system TEXT sets the system message · /exit leaves · Ctrl-C stops an answer"


class Keyboard(Protocol):
    """Where the user's lines come from. `next_line` raises EOFError at the end."""

    interactive: bool

    def next_line(self) -> str: ...


class Terminal:
    """Line editing and history of this session."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession  # noqa: PLC0415 - only where there is a terminal

        self._session: PromptSession[str] = PromptSession()

    def next_line(self) -> str:
        """Ctrl-C drops what was typed."""
        while True:
            try:
                return self._session.prompt("› ")
            except KeyboardInterrupt:
                continue


class Lines:
    """A file or pipe."""

    interactive = False

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    def next_line(self) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line.rstrip("\n")


class Chat:
    """One conversation; `request` holds the other arguments of `KvorumClient.generate`."""

    def __init__(self, target: Target, request: dict[str, Any], system: str | None = None) -> None:
        self._target, self._request, self._system = target, request, system
        self.messages: list[dict[str, str]] = []

    def run(self, keyboard: Keyboard) -> None:
        """Until the lines end or /exit.

        Raises:
            KvorumError: only without a terminal; with one the error is shown and the talk goes on.
        """
        if keyboard.interactive:
            click.secho(_HELP, dim=True)
        with asyncio.Runner() as runner:
            client = runner.run(self._open())
            try:
                while True:
                    try:
                        line = keyboard.next_line().strip()
                    except EOFError:
                        return
                    if line in ("/exit", "/quit"):
                        return
                    if line.startswith("/"):
                        self._command(line)
                    elif line:
                        self._turn(runner, client, line, keyboard.interactive)
            finally:
                runner.run(client.close())

    async def _open(self) -> Any:
        return self._target.client()

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.messages.clear()
            click.secho("(a new conversation)", dim=True, err=True)
        elif word == "/system":
            self._system = rest.strip() or None
            click.secho(f"(system message {'set' if self._system else 'removed'})", dim=True, err=True)
        else:
            click.secho(_HELP, dim=True, err=True)

    def _turn(self, runner: asyncio.Runner, client: Any, line: str, interactive: bool) -> None:
        self.messages.append({"role": "user", "content": line})
        reply = Reply()
        try:
            runner.run(self._answer(client, reply))
        except KeyboardInterrupt:
            click.secho(" (stopped)", dim=True)
            if not interactive:
                raise
        except KvorumError as error:
            if not interactive:
                raise
            click.echo()
            click.secho(f"error: {as_command_error(error)}", fg="red", err=True)
            if not reply.text:  # as if it had not been asked, so that the next question is not odd
                self.messages.pop()
                return
        else:
            click.echo()
            click.secho(reply.line(), dim=True, err=True)
        self.messages.append({"role": "assistant", "content": reply.text})

    async def _answer(self, client: Any, reply: Reply) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        async for message in client.generate(messages=[*system, *self.messages], **self._request):
            for index, piece in reply.add(message):
                if index == 0:
                    click.echo(piece, nl=False)
                    sys.stdout.flush()
