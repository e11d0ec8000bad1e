"""From what a client command was given to a router that answers, and from gRPC errors to exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import grpc

from cluster import state as states
from cluster.failures import BadInput, CommandError, RunFailed
from protos import common_pb2
from protos.channels import ClientTls
from protos.errors import KvorumError

if TYPE_CHECKING:
    from router.client import KvorumClient

F = TypeVar("F", bound=Callable[..., Any])

_ASKED_WRONGLY = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass(frozen=True)
class Target:
    """The routers to talk to, and what they ask for."""

    addresses: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None

    def client(self) -> KvorumClient:
        """A client for them; make it inside the event loop that uses it."""
        from router.client import KvorumClient  # noqa: PLC0415 - every command imports this module

        return KvorumClient(*self.addresses, api_key=self.api_key, tls=self.tls)


def router_options(command: F) -> F:
    """The options by which a client command finds its router; they become `find_target`'s arguments."""
    options = (
        click.option("--name", help="which cluster of this machine; needed only when several are up"),
        click.option("--address", multiple=True, metavar="HOST:PORT", help="a router anywhere; may repeat"),
        click.option("--api-key-file", type=click.Path(path_type=Path), help="else KVORUM_API_KEY"),
        click.option("--tls-ca", type=click.Path(path_type=Path), help="PEM roots; turns TLS on"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def find_target(
    name: str | None, address: tuple[str, ...], api_key_file: Path | None, tls_ca: Path | None
) -> Target:
    """The addressed routers, else those of the cluster that is up on this machine.

    Raises:
        BadInput: no such cluster, or a file cannot be read. RunFailed: it has no router yet.
    """
    key, tls = _read_key(api_key_file), _read_ca(tls_ca)
    if address:
        return Target(address, key, tls)
    state = states.find(name)
    if not state.router_addresses:
        raise RunFailed(f"cluster {state.name!r} is still starting: `kvorum status` shows how far it is")
    return of_state(state, key, tls)


def of_state(state: states.ClusterState, key: str | None = None, tls: ClientTls | None = None) -> Target:
    """The routers of a cluster on this machine; its own token opens them where no API key is given."""
    if tls is None and state.router_ca is not None:
        tls = _read_ca(state.router_ca)
    return Target(state.router_addresses, key or state.token, tls)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn a gRPC error, or a value that fits no field, into one line an item and the exit code that fits."""
    from router.client_request import UnfitValueError  # noqa: PLC0415 - every command imports this module

    try:
        yield
    except UnfitValueError as error:
        raise BadInput(str(error)) from None
    except KvorumError as error:
        raise as_command_error(error) from None


def as_command_error(error: KvorumError) -> CommandError:
    """BadInput when the request is at fault, RunFailed otherwise."""
    kind = BadInput if error.code in _ASKED_WRONGLY else RunFailed
    if len(error.violations) > 1:
        return kind(*(f"{violation.field}: {violation.description}" for violation in error.violations))
    again = f"; try again in {error.retry_after_s:.1f} s" if error.retry_after_s else ""
    key = "; set KVORUM_API_KEY or --api-key-file" if error.reason == common_pb2.UNAUTHENTICATED else ""
    return kind(f"{error.message or error.code.name}{again}{key}")


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("KVORUM_API_KEY") or None
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the API key from {path}: {error}") from None
    if not lines:
        raise BadInput(f"{path} holds no API key")
    return lines[0]


def _read_ca(path: Path | None) -> ClientTls | None:
    if path is None:
        return None
    if not path.is_file():
        raise BadInput(f"--tls-ca: no such file: {path}")
    return ClientTls(ca=path)
