"""The checkpoint's small files on their way from the controller to an ingress without a checkpoint."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from fakes_launch import fake_controller, fake_status

from cluster import checkpoint_files
from cluster.checkpoint_files import read_small_files
from cluster.openai import model_files
from cluster.openai.model_files import ModelFilesError, fetch
from cluster.openai.settings import IngressSettings
from protos import admin_pb2
from protos.errors import KvorumError

PACKED = zlib.compress(b"{}")


def asking(address: str, token: str = "fake-token", **changes: Any) -> IngressSettings:
    return IngressSettings(
        cluster="kvorum", routers=("127.0.0.1:1",), admin_address=address, token=token, **changes
    )


def fetched(address: str, into: Path, **changes: Any) -> admin_pb2.ModelFiles:
    return asyncio.run(fetch(asking(address, **changes), into))


def a_checkpoint(folder: Path) -> Path:
    for name in (
        "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "weights.bin",
        "additional_chat_templates/tools.jinja", ".cache/secret.json", "modeling_own.py",
    ):  # fmt: skip
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_weights_and_hidden_files_stay_where_they_are(tmp_path: Path) -> None:
    found = {
        name: zlib.decompress(packed) for name, packed in read_small_files(a_checkpoint(tmp_path)).items()
    }
    assert found == {
        name: name.encode()
        for name in (
            "additional_chat_templates/tools.jinja", "config.json", "modeling_own.py", "tokenizer.json",
        )
    }  # fmt: skip


def test_files_that_no_message_carries_are_refused_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_MESSAGE_BYTES", 2 * 2**20)
    (tmp_path / "tokenizer.json").write_bytes(os.urandom(2 * 2**20))
    with pytest.raises(KvorumError, match=r"are 2\.0 MiB compressed, more than the 2 MiB"):
        read_small_files(tmp_path)


def test_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvorumError, match=r"cannot read the checkpoint in .*gone"):
        read_small_files(tmp_path / "gone")


def test_files_are_written_under_their_folders(tmp_path: Path) -> None:
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files = admin_pb2.ModelFiles(
            model="m",
            max_model_len=512,
            files={"config.json": PACKED, "additional/a.jinja": zlib.compress(b"x")},
        )
        assert fetched(address, tmp_path / "new") == controller.files
    assert (tmp_path / "new" / "config.json").read_bytes() == b"{}"
    assert (tmp_path / "new" / "additional" / "a.jinja").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.json", "a/../../up.json", "..\\up.json", ""])
def test_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files = admin_pb2.ModelFiles(files={"config.json": PACKED, name: PACKED})
        with pytest.raises(ModelFilesError, match="leads elsewhere"):
            fetched(address, tmp_path / "in")
    assert not list(tmp_path.iterdir())


def test_controller_that_still_starts_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_RETRY_S", 0.01)
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files_refused = 3
        fetched(address, tmp_path)
        assert controller.files_asked == 4


def test_controller_that_never_answers_is_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_RETRY_S", 0.01)
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files_refused = 10**6
        with pytest.raises(ModelFilesError, match=r"'kvorum' at .* did not answer .*: still starting"):
            fetched(address, tmp_path, start_timeout_s=0.2)


def test_wrong_token_is_not_tried_twice(tmp_path: Path) -> None:
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        with pytest.raises(ModelFilesError, match="refuses the model's files: wrong token"):
            fetched(address, tmp_path, token="another")
        assert controller.files_asked == 0


def test_tokenizer_larger_than_a_message_travels_packed(tmp_path: Path) -> None:
    vocabulary = b"".join(b'"token%d": %d,\n' % (i, i) for i in range(2_000_000))
    assert len(vocabulary) > checkpoint_files.MAX_MESSAGE_BYTES
    (tmp_path / "tokenizer.json").write_bytes(vocabulary)
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files = admin_pb2.ModelFiles(files=read_small_files(tmp_path))
        fetched(address, tmp_path / "there")
    assert (tmp_path / "there" / "tokenizer.json").read_bytes() == vocabulary


@pytest.mark.parametrize("content", [b"{}", PACKED[:-4], b""])
def test_file_that_does_not_unpack_is_named(tmp_path: Path, content: bytes) -> None:
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files = admin_pb2.ModelFiles(files={"config.json": content})
        with pytest.raises(ModelFilesError, match=r"'config\.json'"):
            fetched(address, tmp_path / "in")


def test_file_that_unpacks_to_too_much_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_MOST_BYTES", 1000)
    with fake_controller(lambda _n: fake_status()) as (controller, address):
        controller.files = admin_pb2.ModelFiles(files={"config.json": zlib.compress(b"0" * 1001)})
        with pytest.raises(ModelFilesError, match="larger than"):
            fetched(address, tmp_path / "in")
