"""`python -m tests.lab.shell`: emulated hosts to try things on; all is gone when the shell ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from tests.lab.lab import ROOT, Lab, LabError, missing
from tests.lab.ray_nodes import start_ray

_SIGNALLED = 128
"""Plus the signal: what shells make the exit code of a command that a signal ended."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--hosts", default=2, show_default=True, type=click.IntRange(1, 100), help="how many")
@click.option("--rate", default="1gbit", show_default=True, help="of each link, as tc writes it; or `none`")
@click.option(
    "--delay",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="ms that a frame takes one way",
)
@click.option("--ray", is_flag=True, help="start a Ray node on each, for `kvorum up --ray-address`")
@click.option("--on", default=0, show_default=True, help="the host that COMMAND runs on")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(hosts: int, rate: str, delay: float, *, ray: bool, on: int, command: Sequence[str]) -> None:
    """Run COMMAND, by default a shell, on one of several emulated hosts. Needs root and iproute2.

    \b
    Examples:
      python -m tests.lab.shell --hosts 2 --rate 1gbit --delay 5
      python -m tests.lab.shell --ray -- .venv/bin/kvorum up --ray-address host0:6379
    """
    if reason := missing():
        raise click.ClickException(reason)
    if on not in range(hosts):
        raise click.BadParameter(f"there are hosts 0 to {hosts - 1}", param_hint="--on")
    try:
        with Lab(hosts, None if rate == "none" else rate, delay_ms=delay) as lab:
            others = (f"{h.name} {h.ip}: nsenter -at {h.pid}" for h in lab.hosts if h.index != on)
            click.echo("\n".join(others), err=True)
            if ray:
                click.echo(f"Ray is up at {start_ray(lab).address}", err=True)
            shell = command or (os.environ.get("SHELL", "sh"),)
            # Ctrl-C is for the command. A handler is not inherited; SIG_IGN would be.
            signal.signal(signal.SIGINT, lambda _signal, _frame: None)
            code = lab.hosts[on].popen(shell, cwd=ROOT).wait()
    except LabError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code if code >= 0 else _SIGNALLED - code)


if __name__ == "__main__":
    main()
