"""The flags of vLLM's API server, read by vLLM's own parser, as far as they are this server's business."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import (
    BaseFrontendArgs,
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cluster.openai.failures import IngressError

_HTTP = frozenset(
    {
        "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "disable_fastapi_docs",
        "enable_log_requests", "enable_offline_docs", "middleware", "root_path",
    }
)  # fmt: skip
"""Beside those of vLLM's `BaseFrontendArgs`."""

_ELSEWHERE = {
    "host": "http.host",
    "port": "http.port",
    "ssl_keyfile": "http.tls_key",
    "ssl_certfile": "http.tls_cert",
    "api_key": "router.api_keys_file",
    "lora_modules": "engine.lora_modules",
    "model": "engine.model",
    "model_tag": "engine.model",
    "served_model_name": "engine.served_name",
}
_KEY_VARIABLE = "VLLM_API_KEY"
_DEFAULTS = ("--enable-prompt-tokens-details",)


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise IngressError(f"vLLM refuses the HTTP arguments: {message}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """vLLM's namespace for these flags, with its defaults for all others.

    Raises:
        IngressError: with vLLM's own message, or where else the setting belongs.
    """
    if os.environ.get(_KEY_VARIABLE):  # a key that vLLM would ask for beside ours
        raise IngressError(f"{_KEY_VARIABLE} is set: set {_ELSEWHERE['api_key']} instead of {_KEY_VARIABLE}")
    parser: Any = make_arg_parser(_Parser(prog="http.arguments", add_help=False))
    try:
        namespace: argparse.Namespace = parser.parse_args([*_DEFAULTS, *arguments])
        for action in parser._actions:
            action.default = argparse.SUPPRESS
        _refuse_foreign(set(vars(parser.parse_args(list(arguments)))))
        validate_parsed_serve_args(namespace)
    except (ValueError, TypeError, KeyError, argparse.ArgumentError) as error:
        raise IngressError(f"vLLM refuses the HTTP arguments: {_said(error)}") from error
    return namespace


def _refuse_foreign(given: set[str]) -> None:
    ours = {field.name for field in fields(BaseFrontendArgs)} | _HTTP
    of_engine = {field.name for field in fields(AsyncEngineArgs)}
    for name in sorted(given):
        flag = "--" + name.replace("_", "-")
        if where := _ELSEWHERE.get(name):
            raise IngressError(f"{flag} is not for the HTTP arguments: set {where} instead")
        if name in ours:
            continue
        if name in of_engine:
            raise IngressError(
                f"{flag} is an engine argument: set engine.engine_args.{name}, which engines and HTTP follow"
            )
        raise IngressError(f"{flag} says how vLLM itself would serve, and has no meaning here")


def _said(error: Exception) -> str:
    return " ".join(str(error.args[0] if error.args else error).split()) or type(error).__name__
