"""What can be known to be wrong before anything is started."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil

from cluster.config import ClusterConfig
from cluster.failures import BadInput
from cluster.placement import PlacementError, fit

_WITHOUT = {
    "--http-port": ", or go without HTTP: --no-http",
    "--viewer-port": ", or go without the viewer: --no-viewer",
    "--otlp-port": ", or go without the viewer: --no-viewer",
}


def check_ports(config: ClusterConfig) -> None:
    """Raises BadInput for a port that is taken or not ours to take, before anything is started."""
    listening = [
        (config.router.host, config.router.port, "--port"),
        (config.admin_host, config.admin_port, "--admin-port"),
    ]
    if config.http.enabled:
        listening.append((config.http.host, config.http.port, "--http-port"))
    if config.viewer.enabled:
        listening += [
            (config.viewer.host, config.viewer.port, "--viewer-port"),
            (config.viewer.host, config.viewer.otlp_port, "--otlp-port"),
        ]
    _refuse_doubled(listening)
    for host, port, flag in listening:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
            try:
                probe.bind((host, port))
            except socket.gaierror:
                raise BadInput(f"cannot listen on {host!r}: no such address on this machine") from None
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise BadInput(
                        f"port {port} on {host} is in use{_holder(port)}: "
                        f"choose another with {flag} N (0 picks a free one){_or_without(flag)}"
                    ) from None
                raise BadInput(
                    f"cannot listen on {host}:{port}: {error.strerror}; change it with {flag}"
                ) from None


def check_http(config: ClusterConfig) -> None:
    """Raises BadInput for an HTTP face that could never reach its router."""
    if config.http.enabled and config.router.tls_client_ca is not None:
        raise BadInput(
            "router.tls_client_ca: the HTTP face has no client certificate to show its router: use --no-http"
        )


def check_files(config: ClusterConfig) -> None:
    """Raises BadInput for files and folders the configuration names that are not there."""
    router = config.router
    files = {
        name: getattr(router, name)
        for name in ("api_keys_file", "tls_cert", "tls_key", "tls_client_ca")
        if getattr(router, name) is not None
    }
    problems = [f"router.{name}: no such file: {path}" for name, path in files.items() if not path.is_file()]
    for part, enabled, section in (
        ("http", config.http.enabled, config.http),
        ("viewer", config.viewer.enabled, config.viewer),
    ):
        problems += [
            f"{part}.{name}: no such file: {path}"
            for name, path in (("tls_cert", section.tls_cert), ("tls_key", section.tls_key))
            if enabled and path is not None and not path.is_file()
        ]
    problems += [
        f"engine.lora_modules.{name}: no such folder: {path}"
        for name, path in config.engine.lora_modules.items()
        if not Path(path).is_dir()
    ]
    if problems:
        raise BadInput(*problems)


def check_fits_here(config: ClusterConfig) -> None:
    """Early for a private Ray on CPU; with GPUs or another Ray, once Ray says what it has."""
    on_cpu = config.engine.device == "cpu" or (
        config.engine.device == "auto" and not Path("/dev/nvidiactl").exists()
    )
    if config.ray_address is None and on_cpu:
        try:
            fit(config, [own_cores()])
        except PlacementError as error:
            raise BadInput(str(error)) from None


def own_cores() -> int:
    """Cores this process may use, which is what a container was given."""
    return len(os.sched_getaffinity(0))


def _refuse_doubled(listening: list[tuple[str, int, str]]) -> None:
    taken: dict[tuple[str, int], str] = {}
    for host, port, flag in listening:
        if port and (other := taken.setdefault((host, port), flag)) != flag:
            raise BadInput(f"{other} and {flag} are both {port}: give them different ports")


def _or_without(flag: str) -> str:
    return _WITHOUT.get(flag, "")


def _holder(port: int) -> str:
    """` (pid 4711 python)` where the system tells."""
    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return f" (pid {connection.pid} {psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""
