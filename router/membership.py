"""Who serves what: the controller's members, each watched directly.

The last known members are kept while the controller is away; a replica that cannot be reached
is dropped on this router's own evidence, whatever the controller says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from protos import admin_pb2, admin_pb2_grpc, common_pb2
from protos.channels import bearer, open_channel
from protos.errors import KvorumError, invalid
from router.backoff import Backoff
from router.config import RouterConfig
from router.group import ReplicaGroup
from router.leases import LeasedLoad
from router.replica_link import ReplicaLink, Standing
from router.tasks import TaskGroup

log = logging.getLogger(__name__)

_CONTROLLER_SILENCE_S = 60.0
_TOKENIZER_TIMEOUT_S = 30.0
_COME_BACK_S = 1.0
_SERVING = (admin_pb2.READY, admin_pb2.DRAINING)


class Tokenizer(Protocol):
    """What the router needs of a model's tokenizer. Raises KvorumError for what it refuses."""

    @property
    def max_chars_per_token(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]: ...

    def encode_chat(
        self,
        messages: Sequence[common_pb2.ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[NDArray[np.int32], str]: ...


TokenizerFactory = Callable[[admin_pb2.TokenizerBundle], Tokenizer]


class Membership:
    """The models and replicas known to this router.

    `on_change` is called (in the loop, must not block) whenever what can be served may have
    changed. Memory is bounded by the members that the controller lists.
    """

    def __init__(
        self,
        controller_address: str,
        config: RouterConfig,
        make_tokenizer: TokenizerFactory,
        *,
        token: str | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._controller_address, self._token = controller_address, token
        self._config, self._make_tokenizer, self._on_change = config, make_tokenizer, on_change
        self._groups: dict[tuple[str, str], ReplicaGroup] = {}  # by model name and tokenizer digest
        self._links: dict[str, ReplicaLink] = {}  # by replica name, in that order
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, common_pb2.ModelInfo] = {}  # as the controller lists them
        self._listed: Counter[str] = Counter()  # members by model, whatever their state
        self._tokenizers: dict[str, Tokenizer] = {}  # by digest
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskGroup()
        self.controller_connected = False

    async def start(self) -> None:
        """Begin to watch; returns at once, members appear later."""
        self._channel = open_channel(self._controller_address)
        self._admin: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel)
        self._tasks.spawn("watch the controller", self._watch_controller())
        self._tasks.spawn("watch for silence", self._watch_silence())

    async def stop(self) -> None:
        """Close every connection; requests that still run on them end."""
        await self._tasks.cancel()
        for link in self._links.values():
            await link.close(linger_s=0)
        await self._channel.close()

    def models(self) -> list[common_pb2.ModelInfo]:
        """Every model with a known member, by name."""
        return [self._info(name) for name in sorted(self._models)]

    def resolve(self, name: str) -> common_pb2.ModelInfo:
        """The model of that name, or the only one when `name` is empty.

        Raises:
            KvorumError: NOT_FOUND, INVALID_ARGUMENT when empty and there are several, or
                UNAVAILABLE when no model is known yet.
        """
        if name in self._models:
            return self._info(name)
        names = sorted(self._models)
        if not names:
            raise self._nothing_known()
        listed = ", ".join(names)
        if name:
            message = f"model '{name}' is not served here; there is: {listed}"
            raise KvorumError(grpc.StatusCode.NOT_FOUND, common_pb2.MODEL_NOT_FOUND, message)
        if len(names) > 1:
            raise invalid("model", f"several models are served, name one of: {listed}")
        return self._info(names[0])

    def links(self, model: str, digest: str = "") -> list[ReplicaLink]:
        """The replicas of `model` that may be picked, by name; suspect ones only when none is ready.

        With `digest`, only those that use that tokenizer: prompt tokens mean nothing to others.
        """
        standing: dict[Standing, list[ReplicaLink]] = {Standing.READY: [], Standing.SUSPECT: []}
        for link in self._links.values():
            fits = link.model.name == model and digest in {"", link.model.tokenizer_digest}
            if fits and (now := link.standing()) is not Standing.OUT:
                standing[now].append(link)
        return standing[Standing.READY] or standing[Standing.SUSPECT]

    def counts(self, model: str) -> tuple[int, int]:
        """Replicas of `model`: ready, known."""
        links = [link for link in self._links.values() if link.model.name == model]
        return sum(link.standing() is Standing.READY for link in links), max(len(links), self._listed[model])

    def group(self, info: common_pb2.ModelInfo) -> ReplicaGroup:
        """The replicas that prompts tokenised for `info` may go to; may be empty now."""
        key = (info.name, info.tokenizer_digest)
        if key not in self._groups:
            self._groups[key] = ReplicaGroup(info.name, self._config, lambda: self.no_replica(info.name))
        return self._groups[key]

    def groups(self) -> list[ReplicaGroup]:
        """Every group there is."""
        return list(self._groups.values())

    def all_links(self) -> list[ReplicaLink]:
        """Every replica that the controller lists as serving, by name."""
        return list(self._links.values())

    def leased(self) -> dict[str, LeasedLoad]:
        """Every engine that has a lease of this router, with its load."""
        return {key: load for group in self._groups.values() for key, load in group.leases.held().items()}

    def servable(self, model: str) -> bool:
        """Whether a text prompt for `model` could be served now."""
        return self._info(model).tokenizer_digest in self._tokenizers and bool(self.links(model))

    def tokenizer(self, info: common_pb2.ModelInfo) -> Tokenizer:
        """The tokenizer of a model.

        Raises:
            KvorumError: UNAVAILABLE while it has not come from the controller.
        """
        found = self._tokenizers.get(info.tokenizer_digest)
        if found is None:
            message = (
                f"the tokenizer of model '{info.name}' has not arrived from the controller yet; try again"
            )
            raise _not_ready(message)
        return found

    def no_replica(self, model: str) -> KvorumError:
        """The error for a request that nothing can serve now."""
        ready, known = self.counts(model)
        message = f"no replica of model '{model}' can take requests now ({ready} of {known} ready)"
        return _not_ready(f"{message}; try again")

    def _info(self, name: str) -> common_pb2.ModelInfo:
        """A live replica's own word where there is one."""
        for link in self._links.values():
            if link.model.name == name and link.standing() is not Standing.OUT:
                return link.model
        return self._models[name]

    def _nothing_known(self) -> KvorumError:
        if self.controller_connected:
            return _not_ready("no model is served yet: no replica has been announced; try again")
        return _not_ready(
            f"no model is known: the controller at {self._controller_address} has not answered; try again"
        )

    async def _watch_controller(self) -> None:
        backoff = Backoff()
        while True:
            why = await self._watch_controller_once(backoff)
            if self.controller_connected:
                log.warning("controller at %s lost, keeping its members: %s", self._controller_address, why)
            self.controller_connected = False
            await asyncio.sleep(backoff.pause_s())

    async def _watch_controller_once(self, backoff: Backoff) -> str:
        call = self._admin.WatchMembers(admin_pb2.WatchMembersRequest(), metadata=bearer(self._token))
        try:
            while True:
                async with asyncio.timeout(_CONTROLLER_SILENCE_S):
                    members = await call.read()
                if not isinstance(members, admin_pb2.Members):  # grpc.aio.EOF
                    return "it ended the stream of members"
                self.controller_connected = True
                self._apply(members)
                backoff.reset()
        except TimeoutError:
            return f"silent for {_CONTROLLER_SILENCE_S:.0f} s"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except Exception as error:  # a fault of ours must not leave the router deaf
            log.exception("cannot take the members from %s", self._controller_address)
            return str(error)
        finally:
            call.cancel()

    def _apply(self, members: admin_pb2.Members) -> None:
        serving = {m.replica: m for m in members.members if m.address and m.state in _SERVING}
        for name, link in list(self._links.items()):
            member = serving.get(name)
            if member is not None and link.is_for(member):
                link.update_member(member)
            else:
                self._retire(name, link)
        for name, member in serving.items():
            if name not in self._links:
                self._connect(member)
        self._links = dict(sorted(self._links.items()))
        self._models = {m.model.name: m.model for m in members.members if m.model.name}
        self._listed = Counter(m.model.name for m in members.members)
        self._keep_tokenizers()
        self._forget_groups()
        self._on_change()

    def _forget_groups(self) -> None:
        listed = {(info.name, info.tokenizer_digest) for info in self._models.values()}
        for key in [key for key, group in self._groups.items() if group.unused and key not in listed]:
            del self._groups[key]

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s / 2)
            for link in self._links.values():
                link.refresh()
            for group in self._groups.values():
                group.fleet.relax(group.clock())

    def _connect(self, member: admin_pb2.Member) -> None:
        link = ReplicaLink(
            member,
            self.group(member.model),
            self._changed,
            token=self._token,
            heartbeat_s=self._config.heartbeat_s,
            most_blocks=self._config.max_replica_blocks,
        )
        self._links[member.replica] = link
        self._watches[member.replica] = self._tasks.spawn(f"watch {link.key}", link.watch())

    def _retire(self, name: str, link: ReplicaLink) -> None:
        """No new requests; those that run on it may still finish."""
        del self._links[name]
        self._watches.pop(name).cancel()
        link.retire()
        self._tasks.spawn(f"close {link.key}", link.close(self._config.default_deadline_s))

    def _changed(self) -> None:
        self._keep_tokenizers()
        self._on_change()

    def _keep_tokenizers(self) -> None:
        """Fetch what is needed and missing, forget what no member uses."""
        used = {info.tokenizer_digest for info in self._models.values()}
        used |= {link.model.tokenizer_digest for link in self._links.values()}
        used.discard("")
        for digest in self._tokenizers.keys() - used:
            del self._tokenizers[digest]
        for digest in self._fetches.keys() - used:
            self._fetches.pop(digest).cancel()
        for digest in used - self._tokenizers.keys() - self._fetches.keys():
            self._fetches[digest] = self._tasks.spawn(f"fetch tokenizer {digest}", self._fetch(digest))

    async def _fetch(self, digest: str) -> None:
        backoff = Backoff()
        while True:
            try:
                bundle = await self._admin.GetTokenizer(
                    admin_pb2.GetTokenizerRequest(digest=digest),
                    metadata=bearer(self._token),
                    timeout=_TOKENIZER_TIMEOUT_S,
                )
                # Parsing a large vocabulary takes up to a second: not in the loop.
                self._tokenizers[digest] = await asyncio.to_thread(self._make_tokenizer, bundle)
            except (grpc.aio.AioRpcError, KvorumError, ValueError) as error:
                log.warning("no tokenizer %s from %s: %s", digest, self._controller_address, error)
                await asyncio.sleep(backoff.pause_s())
            else:
                self._fetches.pop(digest, None)
                self._on_change()
                return


def _not_ready(message: str) -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.NO_REPLICA_READY,
        message,
        retry_after_s=_COME_BACK_S,
    )
