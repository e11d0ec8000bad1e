"""`kvorum config show` and `kvorum config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cluster.cli_cluster import with_model
from cluster.flags import GroupedCommand, config_flags, overrides


@click.group()
def config() -> None:
    """Show or check a configuration without starting anything."""


@config.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="YAML file; flags override it"
)
@config_flags()
def show(model: str | None, config_file: Path | None, **flags: Any) -> None:
    """Print the effective configuration as YAML: defaults, then the file, then flags.

    \b
    Examples:
      kvorum config show > cluster.yaml
      kvorum config show -c cluster.yaml --replicas 4
    """
    from cluster.config import dump, load

    click.echo(dump(load(config_file, with_model(overrides(flags), model))), nl=False)


@config.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="YAML file; flags override it"
)
@config_flags()
def check(model: str | None, config_file: Path | None, **flags: Any) -> None:
    """Check keys, types, ranges and the files the configuration names; exit code 2 when something is wrong.

    \b
    Example:
      kvorum config check -c cluster.yaml
    """
    from cluster.config import load
    from cluster.preflight import check_files, check_http

    loaded = load(config_file, with_model(overrides(flags), model))
    check_files(loaded)
    check_http(loaded)
    click.echo(
        f"{config_file or 'the configuration'} is valid: {loaded.engine.model} as cluster {loaded.name!r}"
    )
