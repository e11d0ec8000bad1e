"""From a request as it came to a job that can be placed: model, tokens, every check."""

from __future__ import annotations

import time

import numpy as np

from protos import common_pb2, inference_pb2, replica_pb2
from protos.errors import invalid
from router import prompt, validate
from router.config import RouterConfig
from router.forward import Job
from router.group import Wanted, loop_time
from router.membership import Membership
from router.observe import RequestFacts, RequestScope
from router.picker import RouteRequest

Generation = inference_pb2.GenerateRequest | inference_pb2.ChatRequest


def facts(request: Generation, request_id: str, operation: str) -> RequestFacts:
    """What is known of a request before anything of it is checked."""
    sampling = request.sampling
    return RequestFacts(
        request_id=request_id[: validate.MAX_REQUEST_ID_CHARS],
        operation=operation,
        tenant=request.options.tenant[: validate.MAX_NAME_CHARS],
        model=request.model,
        sequences=validate.sequences(sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        message=request,
    )


class Intake:
    """Turns requests into jobs."""

    def __init__(self, config: RouterConfig, members: Membership) -> None:
        self._config, self._members = config, members

    async def job(self, request: Generation, request_id: str, deadline: float, scope: RequestScope) -> Job:
        """Resolve the model, tokenise, validate. `deadline` is in the event loop's time.

        Raises:
            KvorumError: what is wrong with the request, or that no model is known yet.
        """
        arrived = loop_time()
        info = self._members.resolve(request.model)
        started_ns = time.time_ns()
        tokens = await self._prompt(request, info)
        scope.tokenized(info.name, len(tokens.ids), started_ns)
        validate.prompt(tokens.ids, info, tokens.field)
        sampling, options = request.sampling, request.options
        validate.sampling(sampling, info, prompt_tokens=len(tokens.ids), max_n=self._config.max_n)
        validate.options(options, info)
        route = RouteRequest(
            model=info.name,
            prompt_token_ids=tokens.ids,
            revision=info.revision,
            sequences=validate.sequences(sampling),
            max_tokens=validate.room(sampling, info, len(tokens.ids)),
            lora=options.lora,
            cache_salt=options.cache_salt,
            session=options.session,
            tenant=options.tenant,
            priority=options.priority,
            service_class=options.service_class,
        )
        message = replica_pb2.ReplicaGenerateRequest(
            request_id=request_id,
            prompt_token_ids=tokens.ids.tolist(),
            sampling=sampling if request.HasField("sampling") else None,
            priority=options.priority,
            cache_salt=options.cache_salt,
            lora=options.lora,
        )
        served = common_pb2.Served(request_id=request_id, model=info.name, trace_id=scope.trace_id)
        return Job(
            group=self._members.group(info),
            wanted=Wanted(route, arrived, deadline),
            message=message.SerializeToString(),
            served=served,
            scope=scope,
            # A constraint that brings a replica down must not be tried on the next one.
            retryable=not sampling.HasField("structured"),
        )

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """The tokens that Generate or Chat would send to the engine."""
        info = self._members.resolve(request.model)
        tokenizer = self._members.tokenizer(info)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "set text or chat", common_pb2.PROMPT_EMPTY)
        if kind == "chat":
            tokens = await prompt.from_chat(request.chat, tokenizer)
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            tokens = await prompt.from_text(
                request.text, tokenizer, max_tokens=info.max_model_len, add_special_tokens=special
            )
        return inference_pb2.TokenizeResponse(
            model=info.name,
            ids=tokens.ids.tolist(),
            max_model_len=info.max_model_len,
            rendered=tokens.rendered,
        )

    async def _prompt(self, request: Generation, info: common_pb2.ModelInfo) -> prompt.Prompt:
        if isinstance(request, inference_pb2.ChatRequest):
            return await prompt.from_chat(request.chat, self._members.tokenizer(info))
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            return prompt.Prompt(np.array(request.tokens.ids, np.int32), "tokens.ids")
        if kind == "text":
            return await prompt.from_text(
                request.text, self._members.tokenizer(info), max_tokens=info.max_model_len
            )
        if kind == "chat":
            return await prompt.from_chat(request.chat, self._members.tokenizer(info))
        raise invalid("prompt", "set text, tokens or chat", common_pb2.PROMPT_EMPTY)
