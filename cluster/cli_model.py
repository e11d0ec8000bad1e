"""`kvorum model prepare` and `kvorum model list`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from cluster.failures import BadInput


@click.group()
def model() -> None:
    """Prepare models and list them. `kvorum up` prepares what it needs by itself."""


@model.command()
@click.argument("name", default="smollm2")
@click.option(
    "--tensor-parallel-size", type=click.IntRange(min=1), default=1, show_default=True,
    help="pad the heads where this many shards do not divide them",
)  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path), help="where prepared models are kept")
def prepare(name: str, tensor_parallel_size: int, cache_dir: Path | None) -> None:
    """Make NAME servable: convert GGUF, pad heads, write the tokenizer bundle. Once; a second run finds it.

    \b
    Examples:
      kvorum model prepare
      kvorum model prepare smollm2 --tensor-parallel-size 2
      kvorum model prepare ./my-checkpoint
    """
    from cluster.display import Steps, make_console
    from workers.checkpoint import CheckpointError
    from workers.checkpoint import prepare as prepare_model

    steps = Steps(make_console())
    try:
        with steps.bar(f"preparing {name}") as progress:
            prepared = prepare_model(name, tensor_parallel_size, cache_dir=cache_dir, progress=progress)
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    steps.say(f"{prepared.name} is ready in {prepared.path}")
    if prepared.note:
        steps.say(f"  {prepared.note}")


@model.command("list")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="where prepared models are kept")
@click.option("--json", "as_json", is_flag=True, help="as one JSON document")
def list_(cache_dir: Path | None, as_json: bool) -> None:
    """List the built-in models and those that were prepared on this machine.

    \b
    Example:
      kvorum model list
    """
    from rich.table import Table

    from cluster.display import make_console
    from workers.checkpoint import CheckpointError, list_models

    try:
        known = list_models(cache_dir)
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in known], indent=2, default=str))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "from", "prepared", "size", "folder"):
        table.add_column(column, overflow="fold")
    for entry in known:
        size = f"{entry.size_bytes / 2**20:.0f} MiB" if entry.size_bytes else "-"
        table.add_row(
            entry.name, entry.source, "yes" if entry.prepared else "no", size, str(entry.path or "-")
        )
        for variant in entry.padded:
            size = f"{variant.size_bytes / 2**20:.0f} MiB"
            table.add_row(
                f"  padded to {variant.heads}/{variant.kv_heads} heads", "", "yes", size, str(variant.path)
            )
    make_console().print(table)
