"""The served model's small files, from the controller to a folder here: no checkpoint is needed beside it."""

from __future__ import annotations

import asyncio
import time
import zlib
from pathlib import Path, PurePosixPath

import grpc
import grpc.aio

from cluster.openai.settings import IngressSettings
from protos import admin_pb2, admin_pb2_grpc
from protos.channels import bearer, open_channel
from protos.errors import KvorumError, from_rpc_error

_CALL_TIMEOUT_S = 20.0
_RETRY_S = 0.5
_MOST_BYTES = 256 * 2**20
"""Of one file, unpacked."""
_MAY_PASS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""A controller that starts or restarts; anything else would fail again."""


class ModelFilesError(RuntimeError):
    """The model's files cannot be had; the message is one line."""


async def fetch(settings: IngressSettings, into: Path) -> admin_pb2.ModelFiles:
    """Ask the controller, again for `start_timeout_s` while it does not answer, and write the files.

    Args:
        into: an empty folder, made if it is missing.

    Raises:
        ModelFilesError: refused, no answer in time, a file name that leads out of the folder, or a file
            that does not unpack.
        OSError: the folder cannot be written.
    """
    answer = await _ask(settings)
    names = {name: _inside(into, name) for name in answer.files}
    await asyncio.to_thread(_write, {names[name]: content for name, content in answer.files.items()})
    return answer


async def _ask(settings: IngressSettings) -> admin_pb2.ModelFiles:
    deadline = time.monotonic() + settings.start_timeout_s
    where = f"the controller of cluster {settings.cluster!r} at {settings.admin_address}"
    async with open_channel(settings.admin_address) as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await stub.GetModelFiles(
                    admin_pb2.GetModelFilesRequest(),
                    timeout=max(min(left_s, _CALL_TIMEOUT_S), 0.1),
                    metadata=bearer(settings.token),
                )
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            if error.code not in _MAY_PASS:
                raise ModelFilesError(f"{where} refuses the model's files: {_said(error)}") from None
            if time.monotonic() + _RETRY_S > deadline:
                raise ModelFilesError(
                    f"{where} did not answer for {settings.start_timeout_s:.0f} s: {_said(error)}"
                ) from None
            await asyncio.sleep(_RETRY_S)


def _inside(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name or "\\" in name:
        raise ModelFilesError(f"the controller sent a file by the name {name!r}, which leads elsewhere")
    return folder / path


def _write(files: dict[Path, bytes]) -> None:
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_unpacked(path.name, content))


def _unpacked(name: str, content: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(content, _MOST_BYTES)
    except zlib.error as error:
        raise ModelFilesError(
            f"the controller sent {name!r} in a form that does not unpack: {error}"
        ) from None
    if not unpacking.eof:
        raise ModelFilesError(
            f"the controller sent {name!r} cut short, or larger than {_MOST_BYTES >> 20} MiB"
        )
    return unpacked


def _said(error: KvorumError) -> str:
    return error.message or error.code.name
