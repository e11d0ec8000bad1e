"""The HTTP face as a Ray Serve application.

`kvorum up` deploys it beside the router. For a Ray Serve of your own, near or far from the cluster it speaks
for: `serve run cluster.ingress:app KEY=VALUE ...`, or deploy/serve.yaml.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from cluster.openai.face import HttpFace
from cluster.openai.instance import Instance
from cluster.openai.listener import Listen, Listener
from cluster.openai.settings import IngressSettings, key_digests
from telemetry.logs import configure_logging
from workers.pinning import pin_process

TOKEN_VARIABLE = "KVORUM_CLUSTER_TOKEN"  # noqa: S105 - a name
NAME = "ingress"
_SECRETS = f"set {TOKEN_VARIABLE} or token_file, and api_keys_file"
_DRAIN_S = 10.0
_ROOM_FOR_PROBES = 64
"""Serve must not hold back what this process itself would answer at once."""


class Ingress:
    """One replica: the face, and with `listen` a server of its own instead of Serve's proxy."""

    def __init__(self, settings: Mapping[str, Any], listen: Mapping[str, Any] | None = None) -> None:
        known = IngressSettings.model_validate(settings)
        configure_logging("kvorum.ingress", format=known.telemetry.log_format)
        if known.telemetry.log_format == "json":
            os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its records come to us
        pin_process(known.front_cores)
        self._face = HttpFace(known)
        self._app = Instance(self._face, known.token)
        self._listen = None if listen is None else Listen.model_validate(listen)
        self._listener: Listener | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once, in the event loop of all requests: start, and say what its proxy may call.

        Raises:
            OSError: the port is taken; Serve tries again, and tells.
        """
        if self._listen is not None:
            self._listener = await Listener.open(self._app, self._listen, grace_s=_DRAIN_S)
        await self._face.start()

        async def mounted(
            scope: Any, receive: Any, send: Any
        ) -> None:  # no method: uvicorn takes it for ASGI 2
            if scope["type"] != "lifespan":
                await self._app(scope, receive, send)
                return
            for event in ("startup", "shutdown"):  # ours are above and below
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

        return mounted

    async def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises.

        Raises:
            RuntimeError: the face could not start, or its server ended.
        """
        if self._face.phase.startswith("failed"):
            raise RuntimeError(self._face.phase)
        if self._listener is not None and not self._listener.alive:
            raise RuntimeError("the HTTP server ended unexpectedly")

    async def __del__(self) -> None:
        """Called and awaited by Serve before it ends the process."""
        if self._listener is not None:
            await self._listener.close()
        await self._face.stop()


def application(settings: IngressSettings, listen: Listen | None = None, **options: Any) -> serve.Application:
    """The Serve application of these settings; `options` are those of a Serve deployment."""
    limit = settings.max_ongoing_requests + _ROOM_FOR_PROBES
    defaults: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": limit,
        "max_queued_requests": limit,
        "graceful_shutdown_timeout_s": _DRAIN_S + 10.0,
        "ray_actor_options": {"num_cpus": 0},
        "logging_config": {"enable_access_log": False},
    }
    deployment = serve.deployment(serve.ingress()(Ingress)).options(**(defaults | options))
    return deployment.bind(
        settings.model_dump(mode="json"), None if listen is None else listen.model_dump(mode="json")
    )


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application from the `args` of a Serve config file: the fields of `IngressSettings`.

    Secrets stay out of them, for Serve shows them to anyone: the token is read from `token_file`, else from
    KVORUM_CLUSTER_TOKEN; `api_keys_file` (one key a line, # starts a comment) becomes `api_keys`. `routers`
    (separated by commas) and `arguments` (by spaces) may be one string.

    Raises:
        ValueError: a secret or no token, an unknown or unfit field. OSError: a file cannot be read.
    """
    given = dict(args)
    if secrets := {"token", "api_keys"} & given.keys():
        raise ValueError(f"{', '.join(sorted(secrets))} must not be in args, which Serve shows: {_SECRETS}")
    token_file, keys_file = given.pop("token_file", None), given.pop("api_keys_file", None)
    token = Path(token_file).read_text() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    if not token.strip():
        raise ValueError(f"the cluster's token is missing: set {TOKEN_VARIABLE} or token_file")
    given["token"] = token.strip()
    if keys_file:
        given["api_keys"] = key_digests(Path(keys_file))
    for name in ("routers", "arguments"):
        if isinstance(given.get(name), str):
            given[name] = given[name].replace(",", " ").split() if name == "routers" else given[name].split()
    return application(IngressSettings.model_validate(given))
