"""`kvorum generate`, `kvorum explain` and `kvorum chat`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.connect import Target, find_target, router_options, told_plainly
from cluster.failures import BadInput

F = TypeVar("F", bound=Callable[..., Any])

_SAMPLING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-tokens", {"type": int, "help": "tokens to generate; what is left of the context by default"}),
    ("--min-tokens", {"type": int, "help": "tokens before anything may stop it"}),
    ("--temperature", {"type": float, "help": "0 is greedy; 1 by default"}),
    ("--top-p", {"type": float, "help": "sample from this share of the probability"}),
    ("--top-k", {"type": int, "help": "sample from this many tokens"}),
    ("--min-p", {"type": float, "help": "drop tokens below this share of the likeliest one's probability"}),
    ("--seed", {"type": int, "help": "makes sampling repeatable"}),
    ("--stop", {"multiple": True, "help": "a string that ends the text; may repeat"}),
    ("--presence-penalty", {"type": float, "help": "-2 to 2"}),
    ("--frequency-penalty", {"type": float, "help": "-2 to 2"}),
    ("--repetition-penalty", {"type": float, "help": "above 1 discourages repetition"}),
    ("--ignore-eos", {"is_flag": True, "default": None, "help": "go on past the model's own end"}),
)
_STRUCTURED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--regex", {"help": "the text must match it"}),
    ("--json-schema", {"help": "the text must be JSON of this schema; @FILE reads it from a file"}),
    ("--choice", {"multiple": True, "help": "the text must be one of these; may repeat"}),
    ("--grammar", {"help": "the text must parse under this EBNF grammar; @FILE reads it from a file"}),
    ("--json-object", {"is_flag": True, "default": None, "help": "the text must be a JSON object"}),
)
_ROUTING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--session", {"help": "prefer the replica that served this session, all else being about equal"}),
    ("--tenant", {"help": "whom it counts for; tenants share a full cluster fairly"}),
    ("--cache-salt", {"help": "share cached blocks only with requests of the same salt"}),
    ("--priority", {"type": int, "help": "lower is sooner, within a tenant"}),
)
_NOT_GIVEN = (None, (), False)  # unlike an empty text, which was


def request_options(command: F) -> F:
    """Model, sampling and structured output; collected by `_request`."""
    for name, options in reversed(_SAMPLING + _STRUCTURED):
        command = click.option(name, **options)(command)
    command = click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="seconds"
    )(command)
    for name, options in reversed(_ROUTING):
        command = click.option(name, **options)(command)
    command = click.option("--lora", default="", help="adapter to use")(command)
    command = click.option("--model", default="", help="needed only when several are served")(command)
    return router_options(command)


@click.command()
@click.argument("prompt")
@click.option("--chat", "as_chat", is_flag=True, help="send it as a chat message, under the model's template")
@click.option("--system", help="system message; implies --chat")
@click.option("--n", type=int, help="sequences to generate")
@click.option("--json", "as_json", is_flag=True, help="one JSON document with text, usage and times")
@request_options
def generate(
    prompt: str, as_chat: bool, system: str | None, n: int | None, as_json: bool, **given: Any
) -> None:
    """Continue PROMPT (- reads it from stdin) and stream the text to stdout, the figures to stderr.

    \b
    Examples:
      kvorum generate "Once upon a time" --max-tokens 64
      kvorum generate --chat "What is a quorum?" --temperature 0
      kvorum generate "The answer is" --regex '[0-9]+' --json
      cat question.txt | kvorum generate - --chat
    """
    from cluster.display import make_console
    from cluster.reply import Reply

    text = sys.stdin.read() if prompt == "-" else prompt
    target, request = _target_and_request(given)
    request |= _prompt(text, as_chat, system)
    streams = not as_json and (n or 1) == 1

    async def run() -> Reply:
        reply = Reply()
        async with target.client() as client:
            async for message in client.generate(n=n, **request):
                for _index, piece in reply.add(message):
                    if streams:
                        click.echo(piece, nl=False)
        return reply

    with told_plainly():
        reply = asyncio.run(run())
    if as_json:
        click.echo(json.dumps(reply.to_plain(), indent=2, ensure_ascii=False))
        return
    if streams:
        click.echo()
    else:
        for index in sorted(reply.finish):
            click.echo(f"[{index}] {reply.texts.get(index, '')}")
    make_console(stderr=True).print(f"[dim]{reply.line()}[/]")


@click.command()
@click.argument("prompt")
@click.option("--chat", "as_chat", is_flag=True, help="as a chat message, under the model's template")
@click.option("--system", help="system message; implies --chat")
@click.option("--json", "as_json", is_flag=True, help="every term as JSON")
@request_options
def explain(prompt: str, as_chat: bool, system: str | None, as_json: bool, **given: Any) -> None:
    """Show which replica would serve PROMPT (- reads stdin) now, and why; nothing runs.

    A row a replica: prompt tokens that are cached there, in flight there, or to be computed, then the
    predicted milliseconds of each term. The least score wins.

    \b
    Examples:
      kvorum explain "Once upon a time"
      kvorum explain --chat --system "$(cat manual.txt)" "What is a lease?"
      cat long.txt | kvorum explain - --json | jq '.candidates[].ttft_ms'
    """
    from cluster.display import make_console, to_plain
    from cluster.routing_view import explain_view

    text = sys.stdin.read() if prompt == "-" else prompt
    target, request = _target_and_request(given)
    request |= _prompt(text, as_chat, system)

    async def run() -> Any:
        async with target.client() as client:
            return await client.explain(**request)

    with told_plainly():
        found = asyncio.run(run())
    if as_json:
        click.echo(json.dumps(to_plain(found), indent=2, ensure_ascii=False))
    else:
        make_console().print(explain_view(found))


@click.command()
@click.option("--system", help="system message; /system changes it")
@request_options
def chat(system: str | None, **given: Any) -> None:
    """Talk to the model. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts over.

    Without a terminal every line of stdin is one message.

    \b
    Examples:
      kvorum chat
      kvorum chat --system "Answer in one sentence." --temperature 0.3
      echo "What is a quorum?" | kvorum chat
    """
    from cluster.chat import Chat, Lines, Terminal

    target, request = _target_and_request(given)
    keyboard = Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Lines(sys.stdin)
    with told_plainly():
        Chat(target, request, system).run(keyboard)


def _target_and_request(given: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    where = {key: given.pop(key) for key in ("name", "address", "api_key_file", "tls_ca")}
    request = _request(given)  # first: a wrong request is wrong without a cluster too
    return find_target(**where), request


def _request(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `KvorumClient.generate`, without what was not given."""
    from protos import common_pb2

    structured = common_pb2.StructuredOutput()
    chosen = [name for name, _ in _STRUCTURED if given.get(_parameter(name)) not in _NOT_GIVEN]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} exclude each other")
    for name, _options in _STRUCTURED:
        value = given.pop(_parameter(name))
        if value in _NOT_GIVEN:
            continue
        if name == "--choice":
            structured.choice.option.extend(value)
        else:
            setattr(structured, _parameter(name), _from_file(name, value))
        given["structured"] = structured
    return {key: value for key, value in given.items() if value is not None and value != ()}


def _from_file(option: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("@") or option == "--regex":
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{option}: cannot read {value[1:]}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _parameter(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _prompt(text: str, as_chat: bool, system: str | None) -> dict[str, Any]:
    if as_chat or system:
        return {"messages": [*([{"role": "system", "content": system}] if system else []), _user(text)]}
    return {"prompt": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
