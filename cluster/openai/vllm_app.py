"""vLLM's own API server, built as vLLM builds it, with routers in the engine's place.

Nothing here computes: no device is needed, and the model's weights are not read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from cluster.openai import call_scope, front_args
from cluster.openai.engine_client import RouterEngineClient
from cluster.openai.failures import Api, HttpFailure, IngressError
from cluster.openai.null_fields import null_means_default
from cluster.openai.router_health import RouterHealth
from cluster.openai.settings import IngressSettings
from protos import admin_pb2, common_pb2
from router.client import KvorumClient

log = logging.getLogger(__name__)

_TASKS = ("generate",)
_TALKATIVE = (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
)
"""They log every refusal of an engine with a traceback."""


async def build(
    settings: IngressSettings,
    folder: Path,
    files: admin_pb2.ModelFiles,
    client: KvorumClient,
    health: RouterHealth,
) -> FastAPI:
    """The app, initialised; what blocks for long is done in a thread.

    Args:
        folder: where `files` are; must stay there.

    Raises:
        IngressError: vLLM refuses the arguments or the model's files; the message says why.
    """
    level = logging.getLogger().level
    try:
        app, args, engine = await asyncio.to_thread(_prepare, settings, folder, files, client, health)
        await init_app_state(engine, app.state, args, _TASKS)
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
        raise IngressError(f"vLLM's server cannot be set up: {_said(error)}") from error
    finally:
        logging.getLogger().setLevel(level)  # a library of vLLM's, for SageMaker, silences all but errors
    app.state.server = None  # vLLM would stop it when the engine is dead, which ours never is
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_unless_refused)
    return app


def adopt(app: FastAPI, info: common_pb2.ModelInfo) -> None:
    """Follow what the engines allow: the context's length, and the LoRA adapters that are loaded."""
    model_config: Any = app.state.vllm_config.model_config
    if model_config.max_model_len != info.max_model_len:
        log.info("the engines' context is %d tokens, not %d", info.max_model_len, model_config.max_model_len)
        model_config.max_model_len = info.max_model_len
    for number, name in enumerate(info.lora_adapters, start=1):
        app.state.openai_serving_models.lora_requests[name] = LoRARequest(
            lora_name=name, lora_int_id=number, lora_path=name
        )


def _prepare(
    settings: IngressSettings,
    folder: Path,
    files: admin_pb2.ModelFiles,
    client: KvorumClient,
    health: RouterHealth,
) -> tuple[FastAPI, argparse.Namespace, RouterEngineClient]:
    torch.set_num_threads(1)
    null_means_default()
    args = front_args.parse(settings.arguments)
    engine_args = _engine_args(folder, files)
    try:
        config = _config(engine_args)
        # What vLLM's server reads of the engine's arguments.
        args.model, args.served_model_name = files.model, [files.model]
        args.structured_outputs_config = config.structured_outputs_config
        args.reasoning_parser = config.structured_outputs_config.reasoning_parser
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if engine_args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(engine_args.reasoning_parser_plugin)
        validate_api_server_args(args)
        engine = RouterEngineClient(
            config, client, health, model=files.model, timeout_s=settings.request_timeout_s
        )
        app: FastAPI = build_app(args, _TASKS, config.model_config)
        app.add_exception_handler(HTTPException, _refuse_in_openais_shape)
        app.middleware_stack = app.build_middleware_stack()  # vLLM has already built one without it
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, OSError) as error:
        raise IngressError(f"vLLM refuses to serve model {files.model!r}: {_said(error)}") from error
    return app, args, engine


def _engine_args(folder: Path, files: admin_pb2.ModelFiles) -> AsyncEngineArgs:
    """The engines' arguments, in so far as they say what the model is and how its text is treated."""
    known = {field.name for field in fields(AsyncEngineArgs)}
    given = {name: json.loads(text) for name, text in files.engine_args_json.items() if name in known}
    own: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "served_model_name": [files.model],
        "max_model_len": files.max_model_len or given.get("max_model_len"),
        "dtype": files.dtype or "auto",
        # Only text reaches a replica: refuse images and the like before vLLM fetches them from where a
        # client says.
        "language_model_only": True,
    }
    return AsyncEngineArgs(**(given | own))


def _config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """As `vllm launch render` makes it (its entry.py), which asks for no device."""
    model_config: Any = engine_args.create_model_config()
    model_config.quantization = None
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    return VllmConfig(
        model_config=model_config,
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])
    return " ".join(str(error.args[0] if error.args else error).split()) or type(error).__name__


async def _refuse_in_openais_shape(request: Request, error: Exception) -> Response:
    """An unknown path or a wrong method: of Starlette's own exceptions vLLM makes nothing."""
    assert isinstance(error, HTTPException)
    failure = HttpFailure(error.status_code, str(error.detail))
    body = failure.body(Api.of(request.url.path))
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _unless_refused(record: logging.LogRecord) -> bool:
    """A refusal is no fault of this server; the client is told, and the count of statuses shows it."""
    scope = call_scope.current()
    return record.exc_info is None or scope is None or scope.failure is None
