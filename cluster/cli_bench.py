"""`kvorum bench serve`: vLLM's benchmark client, pointed at a running cluster.

The client is called as a library. The `vllm` command cannot start where vLLM is installed under another
name, as its CPU build is: it looks up the version of a package called `vllm`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cluster.failures import BadInput, RunFailed

if TYPE_CHECKING:
    from cluster.state import ClusterState

_ELSEWHERE = ("--base-url", "--host", "--port")
_FILES_TIMEOUT_S = 20.0
_ALL_OPTIONS = "--help=all"
_CLIENTS_KEY = "OPENAI_API_KEY"


@click.group()
def bench() -> None:
    """Measure a running cluster with the tools that others use."""


@bench.command(context_settings={"ignore_unknown_options": True})
@click.option("--name", help="which cluster of this machine; needed only when several are up")
@click.option("--client-help", is_flag=True, help="list the options of vLLM's benchmark client")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(name: str | None, client_help: bool, options: tuple[str, ...]) -> None:
    """Run `vllm bench serve` against the cluster's HTTP face.

    OPTIONS are those of vLLM's client (--client-help lists them). Base URL, model, tokenizer and key are
    set from the running cluster; with --base-url, --host or --port of your own nothing is set for you.

    \b
    Examples:
      kvorum bench serve --num-prompts 32 --max-concurrency 8 --input-len 128 --output-len 32
      kvorum bench serve --backend openai-chat --endpoint /v1/chat/completions --num-prompts 32
      kvorum bench serve --dataset-name prefix_repetition --num-prompts 64 --request-rate 4
      kvorum bench serve --num-prompts 32 --save-result --result-dir results
      kvorum bench serve --client-help
    """
    if client_help:
        _run([_ALL_OPTIONS])
        return
    if any(option.split("=")[0].replace("_", "-") in _ELSEWHERE for option in options):
        _run(options)
        return
    from cluster import state as states

    state = states.find(name)
    with _preset(state) as preset:
        _run([*preset, *options], key=state.token if state.api_keys_file else None)


@contextmanager
def _preset(state: ClusterState) -> Iterator[list[str]]:
    """Options that point the client at the cluster; the tokenizer's folder lives as long as the context.

    Raises:
        BadInput: the cluster has no HTTP face. RunFailed: its controller does not hand the files out.
    """
    from cluster.openai.model_files import ModelFilesError, fetch
    from cluster.openai.settings import IngressSettings

    if not state.http_url:
        raise BadInput(f"cluster {state.name!r} has no HTTP face: start it without --no-http")
    settings = IngressSettings(
        cluster=state.name,
        routers=state.router_addresses,
        admin_address=state.admin_address,
        token=state.token,
        start_timeout_s=_FILES_TIMEOUT_S,
    )
    with tempfile.TemporaryDirectory(prefix="kvorum-bench-") as folder:
        try:
            files = asyncio.run(fetch(settings, Path(folder)))
        except (ModelFilesError, OSError) as error:
            raise RunFailed(f"cannot get the tokenizer of cluster {state.name!r}: {error}") from None
        yield ["--base-url", state.http_url, "--model", files.model, "--tokenizer", folder]


def _run(options: Sequence[str], key: str | None = None) -> None:
    """vLLM's client with these options; `key` is what to show the server, where none was chosen.

    Raises:
        BadInput: it refuses the options. RunFailed: it could not run, or requests failed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import platforms
    from vllm.benchmarks import serve as client
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if key is not None:
        os.environ.setdefault(_CLIENTS_KEY, key)
        # It asks the server's tokenizer whether it agrees with the one here, and shows no key there. The
        # one here is the server's own.
        client._align_prompts_to_server_tokenizer = _agreed

    if platforms.current_platform.is_unspecified():  # a GPU build on a machine without one
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise BadInput(f"vLLM's client refuses its options: {message}; --client-help lists them")

    parser = Parser(prog="kvorum bench serve", usage="kvorum bench serve [OPTIONS]")
    client.add_cli_args(parser)
    try:
        result: dict[str, Any] = client.main(parser.parse_args(list(options)))
    except SystemExit as ended:  # --help
        if ended.code:
            raise RunFailed(f"vLLM's client ended with {ended.code}") from None
        return
    except (AssertionError, ValueError, OSError, RuntimeError) as error:
        raise RunFailed(f"vLLM's client failed: {error}") from None
    if failed := result.get("failed", 0):
        raise RunFailed(f"{failed} of {failed + result['completed']} requests failed")


async def _agreed(_url: str, _model: str, requests: list[Any], _ssl: object = None) -> list[Any]:
    return requests
