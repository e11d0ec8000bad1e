"""The tokenizer bundle: all a router needs to tokenise and template exactly as the engine would.

Resolved with vLLM's own loaders (tokenizer class, chat template, content format), so that the router,
which has neither vLLM nor transformers, has nothing left to decide.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from protos import admin_pb2
from workers.checkpoint_cache import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBES = (
    "",
    " leading and  double spaces\n\n\ttabs ",
    "Numbers 1234567, 3.14; don't I'LL we've",
    "naïve Ünïcode 日本語 中文 한국어 עברית 🙂👩‍👩‍👧 \u200b\u00a0",
    "def f(x):\n    return {'a': [x ** 2, None]}\n",
)


def build_bundle(model_path: Path) -> admin_pb2.TokenizerBundle:
    """The bundle of a checkpoint folder. Imports vLLM and transformers: call it in a worker or a job.

    Raises:
        CheckpointError: there is no fast tokenizer, or a plain `tokenizers.Tokenizer` would not
            give the tokens that the engine's tokenizer gives.
    """
    # vLLM takes seconds to import, and most users of this module's neighbours never need it.
    from vllm.renderers.hf import _detect_content_format, resolve_chat_template  # noqa: PLC0415

    tokenizer, model_type = _load(model_path)
    backend = _plain_backend(model_path, tokenizer)
    # What resolve_chat_template reads of vLLM's ModelConfig.
    model_config = SimpleNamespace(
        tokenizer=str(model_path),
        model=str(model_path),
        tokenizer_revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type=model_type),
    )
    template = resolve_chat_template(tokenizer, None, None, model_config=model_config) or ""
    bundle = admin_pb2.TokenizerBundle(
        tokenizer_json=backend.to_str().encode(),
        chat_template=template,
        special_tokens=tokenizer.special_tokens_map,
        content_format=_detect_content_format(template, default="string") if template else "string",
        chat_adds_special_tokens=False,  # vLLM's BaseRenderer.default_chat_tok_params
    )
    bundle.digest = hashlib.sha256(bundle.SerializeToString(deterministic=True)).hexdigest()
    return bundle


def _load(model_path: Path) -> tuple[Any, str]:
    from transformers import AutoConfig  # noqa: PLC0415
    from vllm.tokenizers import get_tokenizer  # noqa: PLC0415

    try:
        tokenizer = get_tokenizer(str(model_path))
        model_type = AutoConfig.from_pretrained(model_path).model_type
    except Exception as error:
        # transformers raises whatever its parsers ran into: to the user it is one thing.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"cannot load the tokenizer of {model_path}: {reason}; check its tokenizer files"
        ) from error
    if not getattr(tokenizer, "is_fast", False) or not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(
            f"{model_path} has no fast tokenizer (it loads as {type(tokenizer).__name__}): "
            "the router needs one; save the folder with a tokenizer.json"
        )
    return tokenizer, model_type


def _plain_backend(model_path: Path, tokenizer: Any) -> Tokenizer:
    """The backend without truncation or padding, proven on probes to stand for the whole tokenizer."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    special = "".join(tokenizer.all_special_tokens)
    for text in (*_PROBES, special, f"a {special} b"):
        for add in (True, False):
            ours = backend.encode(text, add_special_tokens=add).ids
            if ours != tokenizer.encode(text, add_special_tokens=add):
                raise CheckpointError(
                    f"the tokenizer of {model_path} ({type(tokenizer).__name__}) does more than its "
                    f"tokenizer.json says: {text!r} gives other tokens, so the router cannot serve it"
                )
    return backend
