"""`kvorum demo`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from cluster.cli_cluster import foreground, with_model
from cluster.failures import RunFailed
from cluster.flags import GroupedCommand, config_flags, overrides


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--once", is_flag=True, help="end after the summary instead of staying up")
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="YAML file; flags override it"
)
@config_flags()
def demo(model: str | None, once: bool, config_file: Path | None, **flags: Any) -> int:
    """Bring a cluster up, stream prompts from two clients, show what the prefix cache saves.

    It is called demo, takes a free port unless given one, serves no HTTP without --http, and stays up until
    Ctrl-C.

    \b
    Examples:
      kvorum demo
      kvorum demo --once
      kvorum demo --replicas 1 --tensor-parallel-size 2
    """
    from cluster.config import load
    from cluster.connect import of_state
    from cluster.demo import run_demo
    from cluster.launcher import Launch

    nested = with_model(overrides(flags), model)
    nested.setdefault("name", "demo")
    nested.setdefault("router", {}).setdefault("port", 0)
    nested.setdefault("http", {}).setdefault("enabled", False)  # nothing here asks it
    failed: list[str] = []

    def show(launch: Launch) -> None:
        exchanges = asyncio.run(run_demo(of_state(launch.state), launch.steps.console))
        failed.extend(f"{exchange.lane}: {exchange.error}" for exchange in exchanges if exchange.error)

    code = foreground(load(config_file, nested), once=once, after_ready=show)
    if failed:
        raise RunFailed(*failed)
    return code
