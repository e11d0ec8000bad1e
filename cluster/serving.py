"""Ray Serve around the HTTP face: started with a cluster, found again, and ended with it."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from cluster.certificate import name_in
from cluster.config import ClusterConfig
from cluster.failures import BadInput, RunFailed
from cluster.http_config import HttpConfig
from cluster.http_probe import ask_readiness
from cluster.openai.listener import Listen
from cluster.openai.settings import IngressSettings, digest, key_digests

APPLICATION = "kvorum"
_CONTROLLER = ("SERVE_CONTROLLER_ACTOR", "serve")
_HEAD = "node:__internal_head__"
"""The resource by which Ray marks its head node."""
_POLL_S = 0.1
_SILENCE_S = 60.0
"""A face that has not answered for so long is not there."""
_SHARE_OF_LIMIT = 4
"""Serve adds an ingress replica when this part of the admitted requests are in flight in each."""
_LONGEST = 400
_CALM = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5"}
"""Ten looks a second cost 4 % of a core at rest, for a replica or two that hardly ever change."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound to, but replaced


def address_of(http: HttpConfig, port: int) -> str:
    """The URL at which this machine reaches a face on that port."""
    host = _WILDCARDS.get(http.host, http.host)
    return f"{http.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def settings_of(
    config: ClusterConfig,
    *,
    token: str,
    admin_address: str,
    router_address: str,
    front_cores: tuple[int, ...],
    scratch: Path | None = None,
) -> IngressSettings:
    """What the ingress of this cluster has to know.

    Raises:
        BadInput: the file of API keys holds none, or cannot be read.
    """
    keys: tuple[str, ...] = ()
    if config.router.api_keys_file is not None:
        try:
            keys = (*key_digests(config.router.api_keys_file), digest(token))
        except (OSError, ValueError) as error:
            raise BadInput(f"router.api_keys_file: {error}") from None
    return IngressSettings(
        cluster=config.name,
        routers=(_reachable(router_address),),
        admin_address=_reachable(admin_address),
        token=token,
        tls_ca=config.router.tls_cert,
        tls_server_name=_name_in(config.router.tls_cert),
        api_keys=keys,
        arguments=config.http.arguments,
        telemetry=config.telemetry,
        max_ongoing_requests=config.http.max_ongoing_requests,
        request_timeout_s=config.http.request_timeout_s,
        lookaside=config.http.lookaside,
        start_timeout_s=config.engine.start_timeout_s,
        front_cores=front_cores,
        scratch=scratch,
    )


def refuse_foreign() -> None:
    """Raises BadInput when the connected Ray runs a Serve already: its settings are not ours to change."""
    import ray  # noqa: PLC0415 - seconds

    with contextlib.suppress(ValueError):
        ray.get_actor(*_CONTROLLER)
        raise BadInput(
            "this Ray runs Ray Serve already: use --no-http, and put the HTTP face into that Serve with "
            "`serve deploy deploy/serve.yaml` if it is wanted"
        )


def start(config: ClusterConfig, settings: IngressSettings, port: int) -> None:
    """Start Ray Serve in the connected Ray and deploy the face; returns before it answers.

    Raises:
        BadInput: a proxy is asked for, which would be on another host than the face.
        ray.exceptions.RayError: Serve could not start.
    """
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415 - seconds

    from cluster.ingress import application  # noqa: PLC0415

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    http, here = config.http, ray.get_runtime_context().get_node_id()
    if http.via == "proxy" and here not in (n["NodeID"] for n in ray.nodes() if _HEAD in n["Resources"]):
        raise BadInput(
            "http.via proxy: Serve's proxy runs on the head node of this Ray, and this is another node: "
            "run `kvorum up` there, or use --http-via direct"
        )
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    # The port was chosen on this host, and clients look for the face here.
    actor = {"num_cpus": 0, "label_selector": {"ray.io/node-id": here}}
    variables = dict(_CALM)
    if http.via == "direct":
        serve.start(
            proxy_location="Disabled",
            logging_config=quiet,
            controller_options={"runtime_env": {"env_vars": variables}},
        )
        listen = Listen(host=http.host, port=port, tls_cert=http.tls_cert, tls_key=http.tls_key)
        target = application(settings, listen, ray_actor_options=actor, logging_config=quiet)
        route = None
    else:
        variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "cluster.openai.proxy_headers:middlewares"
        serve.start(
            proxy_location="HeadOnly",
            http_options=_proxy_options(http, port),
            logging_config=quiet,
            controller_options={"runtime_env": {"env_vars": variables}},
        )
        target = application(settings, ray_actor_options=actor, logging_config=quiet, **_scaling(http))
        route = "/"
    serve.run_many(
        [serve.RunTarget(target, name=APPLICATION, route_prefix=route)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def stop() -> None:
    """End the Serve of the connected Ray with all that belongs to it; none there is fine."""
    from ray import serve  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with contextlib.suppress(RayError, TimeoutError):
        serve.shutdown()


def complaint() -> str:
    """What Serve, in the connected Ray, says of a face that does not answer; empty when nothing is wrong."""
    from ray import serve  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415

    try:
        found = serve.status().applications.get(APPLICATION)
    except (RayError, RuntimeError, TimeoutError) as error:
        return f"Ray Serve does not answer ({type(error).__name__})"
    if found is None:
        return "Ray Serve does not know it"
    messages = [found.message, *(deployment.message for deployment in found.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""


class Waiting:
    """Watches a face that starts, alongside whatever else is waited for."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._heard = time.monotonic()
        self.silent = False
        """It has not answered for so long that it will not."""
        self.phase = ""

    def look(self) -> bool:
        """Ask once; True when it is ready.

        Raises:
            RunFailed: it gave up, with its own reason.
        """
        now = ask_readiness(self._address, self._token)
        if now.failed:
            raise RunFailed(f"the HTTP face at {self._address} {now.phase}")
        if now.answered:
            self._heard = time.monotonic()
        self.silent = time.monotonic() - self._heard > _SILENCE_S
        self.phase = now.phase
        return now.ready

    def until_ready(self, timeout_s: float) -> bool:
        """Block until it is ready; False when it stayed silent or the time is over.

        Raises:
            RunFailed: it gave up.
        """
        deadline = time.monotonic() + timeout_s
        while not self.look():
            if self.silent or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _proxy_options(http: HttpConfig, port: int) -> dict[str, Any]:
    options: dict[str, Any] = {"host": http.host, "port": port, "keep_alive_timeout_s": 75}
    if http.tls_cert is not None:
        options |= {"ssl_certfile": str(http.tls_cert), "ssl_keyfile": str(http.tls_key)}
    return options


def _scaling(http: HttpConfig) -> dict[str, Any]:
    if http.max_replicas is None or http.max_replicas == http.replicas:
        return {"num_replicas": http.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": http.replicas,
            "max_replicas": http.max_replicas,
            "target_ongoing_requests": max(1, http.max_ongoing_requests // _SHARE_OF_LIMIT),
        }
    }


def _name_in(certificate: Path | None) -> str | None:
    """What the router's certificate is for. The ingress trusts that very file, and dials this host."""
    if certificate is None:
        return None
    try:
        return name_in(certificate)
    except (OSError, ValueError) as error:
        raise BadInput(f"router.tls_cert: {error}") from None


def _reachable(address: str) -> str:
    """A server that listens everywhere is asked on loopback: the ingress is on its host."""
    host, _, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host.strip('[]'), host)}:{port}"
