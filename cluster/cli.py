"""`kvorum`: the one entry point of people and scripts.

Commands live in `cluster/cli_*.py` and are imported when they are called, so that `--help` is instant.
Exit codes: 0 done, 1 running it failed, 2 the request is wrong as written, 130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import click

from cluster.failures import BadInput, CommandError

DEBUG_VARIABLE = "KVORUM_DEBUG"

COMMANDS = {
    "up": ("cluster.cli_cluster", "Start a cluster that serves a model"),
    "down": ("cluster.cli_cluster", "Stop a cluster"),
    "status": ("cluster.cli_cluster", "Show replicas, shards, cache and load"),
    "generate": ("cluster.cli_client", "Continue one prompt"),
    "chat": ("cluster.cli_client", "Talk to the model"),
    "explain": ("cluster.cli_client", "Show which replica would serve a prompt, and why"),
    "trace": ("cluster.cli_trace", "Show where the time of a request went"),
    "doctor": ("cluster.cli_doctor", "Name what slows a cluster down, and the setting to change"),
    "model": ("cluster.cli_model", "Prepare models and list them"),
    "router": ("cluster.cli_router", "Run one more router"),
    "config": ("cluster.cli_config", "Show or check a configuration"),
    "bench": ("cluster.cli_bench", "Measure a running cluster"),
    "demo": ("cluster.cli_demo", "Bring a cluster up and show what it does"),
}


class LazyGroup(click.Group):
    """Knows its commands by name and one line of help; imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
            raise BadInput(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(version("kvorum"), prog_name="kvorum")
def cli() -> None:
    """Serve a large language model from a cluster of actors behind a streaming gRPC router.

    \b
    Start here:
      kvorum up                 serve the built-in model with two replicas
      kvorum chat               talk to it
      kvorum demo --once        see what it does, then clean up
    """


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911 - one a kind of ending
    """Run one command; every failure is one line on stderr and an exit code, never a traceback."""
    try:
        result = cli.main(list(arguments) if arguments is not None else None, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        _debug()
        message = error.format_message()
        context = error.ctx if isinstance(error, click.UsageError) else None
        return _fail(
            [f"{message.rstrip('.')}; see `{context.command_path} --help`" if context else message], 2
        )
    except CommandError as error:
        _debug()
        return _fail(error.problems, error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        return int(getattr(error.__cause__, "exit_code", 130))  # click wraps what it caught
    except BrokenPipeError:
        sys.stderr.close()  # else Python complains while it flushes
        return 1
    except Exception as error:
        _debug()
        return _fail([f"unexpected {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where"], 1)


def _fail(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        click.echo(f"error: {' '.join(problem.split())}", err=True)
    return code


def _debug() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
