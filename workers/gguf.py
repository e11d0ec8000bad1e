"""From one GGUF file to an ordinary safetensors folder, through transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from workers.checkpoint_cache import CheckpointError, Progress


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write weights (bfloat16), tokenizer, chat template and generation config into `target`.

    Raises:
        CheckpointError: the file is corrupt, or of an architecture transformers cannot read.
    """
    try:
        _convert(source, target, progress)
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # a full disk, not a bad file
            raise
        # transformers and gguf raise whatever their parsers ran into: to the user it is one thing.
        reason = (str(error).strip() or "unreadable").splitlines()[0]
        raise CheckpointError(
            f"cannot convert {source}: not a whole GGUF file of a known architecture "
            f"({type(error).__name__}: {reason}); fetch or install it again"
        ) from error


def _convert(source: Path, target: Path, progress: Progress) -> None:
    # Heavy imports, in the converting process only.
    import gguf  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils  # noqa: PLC0415
    from transformers.integrations.gguf.reader import read_gguf_metadata  # noqa: PLC0415

    # transformers opens the file anew for tokenizer, config and weights, and parsing takes seconds.
    gguf.GGUFReader = cache(gguf.GGUFReader)
    # Fractions follow the time each part takes on the default model.
    progress("reading the GGUF file", 0.0)
    metadata, _ = read_gguf_metadata(str(source))
    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _restore_pre_tokenizer(tokenizer, str(metadata.get("tokenizer.ggml.pre", "")))
    progress("reading the GGUF file", 0.3)

    def counted(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(tensors)
        for number, tensor in enumerate(listed):
            progress("converting weights", number / len(listed))
            yield tensor

    modeling_gguf_pytorch_utils.tqdm = counted
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    progress("converting weights", 1.0)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _restore_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """transformers gives every GGUF byte-level BPE the GPT-2 split; a `smollm` one splits digits first.

    Without it spaces before a number are grouped in ways the model never saw in training.
    """
    if kind != "smollm":
        return
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
