"""`kvorum up`, `down` and `status`."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.failures import BadInput, RunFailed
from cluster.flags import GroupedCommand, config_flags, overrides

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.display import Steps
    from cluster.launcher import Launch
    from cluster.state import ClusterState

TOKEN_VARIABLE = "KVORUM_CLUSTER_TOKEN"  # noqa: S105 - a name


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="YAML file; flags override it"
)
@click.option("--detach", is_flag=True, help="return when the cluster is ready and leave it running")
@config_flags()
def up(model: str | None, config_file: Path | None, detach: bool, **flags: Any) -> int:
    """Start a cluster that serves MODEL: a built-in name, a checkpoint folder, a GGUF file or a hub id.

    Stays in the foreground until Ctrl-C, which stops exactly what was started; a second one skips the
    waiting for running requests.

    \b
    Examples:
      kvorum up
      kvorum up ./my-checkpoint --replicas 1 --tensor-parallel-size 2 --max-model-len 4096
      kvorum up -c cluster.yaml --port 0 --detach
      kvorum up --engine-arg kv_cache_dtype=fp8 --engine-arg 'compilation_config={level: 3}'
    """
    from cluster.config import load

    return foreground(load(config_file, with_model(overrides(flags), model)), detach=detach)


@click.command()
@click.option("--name", help="which cluster; needed only when several are up")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="seconds for running requests",
)
@click.option("--force", is_flag=True, help="end everything at once, even a launch in progress")
def down(name: str | None, grace: float, force: bool) -> None:
    """Stop a cluster: drain its replicas, end its processes, forget it. Nothing running is fine.

    \b
    Examples:
      kvorum down
      kvorum down --name demo --grace 5
      kvorum down --force
    """
    import threading
    from contextlib import nullcontext

    from cluster import state as states
    from cluster.display import make_console
    from cluster.teardown import tear_down

    console = make_console()
    if (states.read(name) is None) if name else not states.names():
        console.print(f"nothing named {name!r} is running" if name else "nothing is running")
        return
    state = states.find(name)
    hurry = threading.Event()
    if force:
        hurry.set()
        launcher = state.launcher.process()
        if state.phase == "starting" and launcher is not None and launcher.pid != os.getpid():
            launcher.kill()  # its clean-up is what happens next, here
    with nullcontext() if force else states.locked(state.name):
        left = tear_down(state, grace_s=grace, say=console.print, hurry=hurry)
    if left:
        raise RunFailed(f"these processes would not end: {', '.join(left)}; end them by hand")
    console.print(f"{state.name} is down; nothing is left running")


@click.command()
@click.option("--name", help="which cluster; needed only when several are up")
@click.option(
    "--address", metavar="HOST:PORT", help=f"a controller's admin API; its token in {TOKEN_VARIABLE}"
)
@click.option("--json", "as_json", is_flag=True, help="everything, as one JSON document")
@click.option("--watch", is_flag=True, help="again every second until Ctrl-C")
@click.option("--overlap", is_flag=True, help="instead: how each shard overlaps AllReduce, and what it hides")
def status(name: str | None, address: str | None, as_json: bool, watch: bool, overlap: bool) -> None:
    """Show a cluster: replicas, their shards and where they sit, KV cache, load, prefix hits, restarts.

    Then, for each router, how well it knows the replicas: blocks indexed, learned speed, mean error of its
    predictions, and why a replica gets no cache credit where that is so.

    \b
    Examples:
      kvorum status
      kvorum status --watch
      kvorum status --json | jq '.replicas[].load.kv_usage'
      kvorum status --overlap
    """
    from rich.console import Group
    from rich.live import Live

    from cluster import state as states
    from cluster.adminclient import AdminClient
    from cluster.display import http_line, make_console, status_json, status_view, viewer_line
    from cluster.http_probe import ask_readiness
    from cluster.overlap_view import overlap_json, overlap_view
    from cluster.routing_view import ask_routers, routing_view
    from cluster.viewer_client import is_alive

    console = make_console()
    where, token = _controller(name, address)
    target = _routers(name) if address is None else None
    here = states.find(name) if address is None else None
    http, page, page_ca = (here.http_url, here.viewer_url, here.viewer_ca) if here else ("", "", None)
    with AdminClient(where, token) as admin:

        def shown() -> Any:
            if overlap:
                asked = _ask(admin.overlap, where)
                return overlap_json(asked) if as_json else overlap_view(asked)
            found = _ask(admin.status, where)
            routing = ask_routers(found, token, target)
            face = (http, ask_readiness(http, token)) if http else None
            viewer = (page, is_alive(page, ca=page_ca)) if page else None
            if as_json:
                return status_json(found, routing, face, viewer)
            lines = [http_line(*face)] if face else []
            lines += [viewer_line(*viewer)] if viewer else []
            return Group(status_view(found), routing_view(routing), *lines)

        def show(what: Any) -> None:
            click.echo(what) if as_json else console.print(what)

        if not watch:
            show(shown())
        elif as_json or not console.is_terminal:
            while True:
                show(shown())
                time.sleep(1.0)
        else:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(shown(), refresh=True)
                    time.sleep(1.0)


def foreground(
    config: ClusterConfig,
    *,
    detach: bool = False,
    once: bool = False,
    after_ready: Callable[[Launch], None] | None = None,
) -> int:
    """Bring a cluster up, call `after_ready`, say what to do next, and stay until Ctrl-C.

    With `detach` return and leave it running; with `once` end it right after `after_ready`. Returns the
    exit code: 0 also for the Ctrl-C that ends a ready cluster in order, 130 when a second one cut that short.
    """
    from cluster.display import Steps, make_console
    from cluster.interrupts import Interrupted, Interrupts
    from cluster.launcher import launch

    steps, started = Steps(make_console()), time.monotonic()
    with Interrupts() as interrupts:
        running = launch(config, steps, interrupts)
        state = running.state
        addresses = [*state.router_addresses, *([f"{state.http_url}/v1"] if state.http_url else [])]
        steps.say(
            f"[bold]{state.name} is up[/]: {state.model} at {' and '.join(addresses)} "
            f"[dim]after {time.monotonic() - started:.1f} s[/]"
        )
        try:
            if after_ready is not None:
                after_ready(running)
            if not once:
                _say_what_next(state, steps)
            if detach:
                return 0
            if not once:
                running.watch()
                return 0
            running.stop(grace_s=5.0)
        except Interrupted as stopped:
            running.stop()
            return stopped.exit_code if interrupts.hurry.is_set() or once else 0
        except BaseException:
            running.stop(grace_s=0.0)
            raise
    return 0


def _say_what_next(state: ClusterState, steps: Steps) -> None:
    named = "" if state.name == "kvorum" else f" --name {state.name}"
    for command, what in (
        (f"chat{named}", "talk to it"),
        (f"status{named}", "replicas, cache and load"),
        ("trace --last", "where the time of the last request went"),
        (f"doctor{named}", "what slows it down, and what to change"),
        (f"down{named}", "stop it"),
    ):
        steps.say(f"  kvorum {command:<20} {what}")
    if state.http_url:
        for line in curl_example(state):
            steps.say(line)
    if state.viewer_url:
        key = "/?key=..." if state.api_keys_file else ""
        steps.say(f"  requests, traces and the fleet: {state.viewer_url}{key}")


def curl_example(state: ClusterState) -> list[str]:
    """A chat over HTTP, to be pasted into a shell."""
    body = {"model": state.model, "messages": [{"role": "user", "content": "Hello"}]}
    trust = " -k" if state.http_url.startswith("https:") else ""
    key = ' -H "Authorization: Bearer $KVORUM_API_KEY"' if state.api_keys_file else ""
    return [
        f"  curl{trust} {state.http_url}/v1/chat/completions{key} \\",
        f"    -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
    ]


def with_model(nested: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The MODEL argument among the flags' values.

    Raises:
        BadInput: --model names another one.
    """
    if model is None:
        return nested
    engine = nested.setdefault("engine", {})
    if engine.setdefault("model", model) != model:
        raise BadInput(f"two models: {model!r} as the argument and {engine['model']!r} as --model; give one")
    return nested


def _controller(name: str | None, address: str | None) -> tuple[str, str]:
    from cluster import state as states

    if address:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise BadInput(f"--address needs the cluster's token in {TOKEN_VARIABLE}")
        return address, token
    state = states.find(name)
    if not state.admin_address:
        raise RunFailed(f"cluster {state.name!r} is still starting: ask again when its controller is up")
    return state.admin_address, state.token


def _routers(name: str | None) -> Any:
    """How to reach this cluster's routers: TLS and token."""
    from cluster import state as states
    from cluster.connect import of_state

    return of_state(states.find(name))


def _ask(question: Callable[[], Any], where: str) -> Any:
    from protos.errors import KvorumError

    try:
        return question()
    except KvorumError as error:
        raise RunFailed(
            f"the controller at {where} does not answer ({error.code.name}: {error.message}); "
            "if it stays so, `kvorum down` ends what is left"
        ) from None
