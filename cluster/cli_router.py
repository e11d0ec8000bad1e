"""`kvorum router`: one more router, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.failures import BadInput, RunFailed
from cluster.flags import GroupedCommand, config_flags, overrides

if TYPE_CHECKING:
    from telemetry.config import TelemetryConfig

_TOKEN_VARIABLE = "KVORUM_CLUSTER_TOKEN"  # noqa: S105 - a name


@click.command(cls=GroupedCommand)
@click.option("--controller", metavar="HOST:PORT", help="admin API of the cluster's controller")
@click.option("--name", help="a cluster of this machine, instead of --controller")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help=f"the cluster's token; else {_TOKEN_VARIABLE}"
)
@click.option(
    "--grace", type=click.FloatRange(min=0), default=30.0, help="seconds for running streams at the end"
)
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="the cluster's YAML file"
)
@config_flags("router", "telemetry")
def router(
    controller: str | None, name: str | None, token_file: Path | None, grace: float, config_file: Path | None,
    **flags: Any,
) -> None:  # fmt: skip
    """Run one more router: it learns the replicas from the controller and keeps no state of its own.

    \b
    Examples:
      kvorum router --port 50052
      KVORUM_CLUSTER_TOKEN=... kvorum router --controller 10.0.0.1:7000 --router-host 0.0.0.0
    """
    from cluster import state as states
    from cluster.config import load
    from router.main import serve

    config = load(config_file, overrides(flags))
    address, token = _controller(controller, name, token_file)
    try:
        serve(
            config.router,
            address,
            token,
            telemetry=_seen_by_viewer(states.with_span_store(config.telemetry), controller, name),
            grace_s=grace,
            on_ready=lambda where: click.echo(f"router listens on {where}; Ctrl-C drains and stops it"),
        )
    except (OSError, ValueError) as error:
        raise RunFailed(str(error)) from None


def _seen_by_viewer(telemetry: TelemetryConfig, controller: str | None, name: str | None) -> TelemetryConfig:
    """With the viewer of a cluster of this machine told of it; of a cluster elsewhere nothing is known."""
    from cluster import state as states
    from cluster.viewer_config import viewer_key
    from telemetry.config import ViewerTarget

    state = states.find(name) if controller is None else None
    if state is None or not state.viewer_otlp or not telemetry.enabled:
        return telemetry
    target = ViewerTarget(address=state.viewer_otlp, token=viewer_key(state.token))
    return telemetry.model_copy(update={"viewer": target})


def _controller(controller: str | None, name: str | None, token_file: Path | None) -> tuple[str, str | None]:
    from cluster import state as states

    if controller is None:
        state = states.find(name)
        if not state.admin_address:
            raise RunFailed(f"cluster {state.name!r} is still starting: its controller is not up yet")
        return state.admin_address, state.token
    host, _, port = controller.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"--controller {controller!r} is not HOST:PORT")
    if token_file is None:
        return controller, os.environ.get(_TOKEN_VARIABLE) or None
    try:
        return controller, token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the token from {token_file}: {error}") from None
