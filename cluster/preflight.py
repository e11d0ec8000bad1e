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
from workers.kvpool.folder import folder_of_cluster

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
    if config.ray_address is None and _on_cpu(config):
        try:
            fit(config, [own_cores()])
        except PlacementError as error:
            raise BadInput(str(error)) from None


def check_kv_pool(config: ClusterConfig) -> None:
    """Raises BadInput for a KV pool that this machine cannot hold; hosts of another Ray say so themselves."""
    engine = config.engine
    if not engine.kv_pool_gib or config.ray_address is not None or not _on_cpu(config):
        return
    folder = folder_of_cluster(engine, "").parent
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(
            f"the KV pool cannot be made in {folder}: this user may not write to {there}; name another "
            "folder with --kv-pool-folder, or go without it: --kv-pool-gib 0"
        )
    needed, found = int(engine.kv_pool_gib * 2**30), os.statvfs(there)
    free, memory = found.f_bavail * found.f_frsize, psutil.virtual_memory().available
    if found.f_blocks and free < needed:  # a file system without blocks has no limit of its own
        raise BadInput(
            f"a KV pool of {_gib(needed)} does not fit in {folder}, where {_gib(free)} of "
            f"{_gib(found.f_blocks * found.f_frsize)} are free: make --kv-pool-gib smaller, free what fills "
            f"it, or enlarge it (mount -o remount,size=… {there})"
        )
    if engine.kv_pool_folder is None and memory < needed:  # a folder of one's own may be on a disk
        raise BadInput(
            f"a KV pool of {_gib(needed)} does not fit in this machine's memory, of which {_gib(memory)} are "
            "available: make --kv-pool-gib smaller"
        )


def own_cores() -> int:
    """Cores this process may use, which is what a container was given."""
    return len(os.sched_getaffinity(0))


def _on_cpu(config: ClusterConfig) -> bool:
    """As far as that can be told without the engine."""
    device = config.engine.device
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


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
