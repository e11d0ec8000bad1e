"""Every configuration field is a flag, and a flag changes exactly its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field

from cluster.config import ClusterConfig, leaves, load
from cluster.failures import ConfigError
from cluster.flags import GroupedCommand, all_flags, config_flags, overrides


@click.command(cls=GroupedCommand)
@click.option("--detach", is_flag=True, help="an option of the command itself")
@config_flags()
@click.pass_obj
def fake_command(seen: dict[str, Any], /, detach: bool, **flags: Any) -> None:
    seen.update(overrides(flags))


def given(*arguments: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    result = CliRunner().invoke(fake_command, arguments, obj=seen)
    assert result.exit_code == 0, result.output
    return seen


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(fake_command, arguments, obj={})
    assert result.exit_code == 2
    return result.output


def test_every_field_has_exactly_one_flag() -> None:
    flags = all_flags()
    assert [flag.path for flag in flags] == [path for path, _field in leaves()]
    assert len({flag.option for flag in flags}) == len(flags)


def test_no_flag_given_overrides_nothing() -> None:
    assert given() == {}


def test_flags_land_in_their_sections() -> None:
    assert given("--replicas", "3", "--port", "0", "--tensor-parallel-size", "2", "--policy", "random") == {
        "replicas": 3,
        "engine": {"tensor_parallel_size": 2},
        "router": {"port": 0, "policy": "random"},
    }


def test_names_that_need_their_section_have_it() -> None:
    assert given("--admin-port", "7", "--router-host", "::1") == {"admin_port": 7, "router": {"host": "::1"}}


@pytest.mark.parametrize(("flag", "value"), [("--compile", True), ("--no-compile", False)])
def test_booleans_can_be_switched_either_way(flag: str, value: bool) -> None:
    assert given(flag) == {"engine": {"compile": value}}


@pytest.mark.parametrize("value", ["auto", "off", "1", "8"])
def test_overlap_is_a_flag_of_few_values(value: str) -> None:
    nested = given("--overlap", value, "--tensor-parallel-size", "2")
    assert load(None, nested).engine.overlap == value


def test_overlap_of_five_chunks_is_refused_with_what_there_is() -> None:
    assert "'5' is not one of 'auto', 'off', '1', '2', '3', '4', '6', '8'" in refusal("--overlap", "5")


def test_engine_arguments_are_read_as_yaml() -> None:
    nested = given(
        "--engine-arg", "block-size=32", "--engine-arg", "speculative_config={method: ngram, n: 2}",
        "--engine-arg", "kv_cache_dtype=fp8", "--engine-arg", "override=",
    )  # fmt: skip
    assert nested["engine"]["engine_args"] == {
        "block_size": 32,
        "speculative_config": {"method": "ngram", "n": 2},
        "kv_cache_dtype": "fp8",
        "override": None,
    }


def test_lora_modules_stay_text_and_their_names_stay_as_written() -> None:
    assert given("--lora-module", "my-lora=./1") == {"engine": {"lora_modules": {"my-lora": "./1"}}}


def test_engine_argument_without_a_value_is_refused() -> None:
    assert "'block_size' is not KEY=VALUE" in refusal("--engine-arg", "block_size")


def test_unknown_flag_suggests_the_nearest() -> None:
    assert "--tensor-parallel-size" in refusal("--tensor-paralel-size", "2")


def test_wrong_type_names_the_flag() -> None:
    assert "--replicas" in refusal("--replicas", "many")


def test_ranges_are_checked_where_the_file_s_are() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        load(None, given("--replicas", "0"))


def test_help_groups_flags_by_section_with_their_descriptions() -> None:
    text = CliRunner().invoke(fake_command, ["--help"], obj={}).output
    order = [text.index(title) for title in ("Options:", "Cluster:", "Engine:", "Router:", "Telemetry:")]
    assert order == sorted(order)
    assert "%%" not in text
    assert text.index("--detach") < text.index("--replicas") < text.index("--max-model-len")


def test_a_flag_of_each_field_reaches_that_field(tmp_path: Path) -> None:
    examples = {int: "3", float: "2.5", str: "text", Path: str(tmp_path), bool: None}
    for flag in all_flags():
        if flag.kind not in examples:
            continue
        value = examples[flag.kind]
        nested = given(f"--{flag.option}", *([value] if value else []))
        for part in flag.path[:-1]:
            nested = nested[part]
        assert list(nested) == [flag.path[-1]]
        assert isinstance(nested[flag.path[-1]], flag.kind)


def test_two_fields_under_one_flag_are_a_programming_error() -> None:
    class Section(BaseModel):
        host: int = Field(0, description="-")

    class Clashing(BaseModel):
        a: Section = Section()
        a_host: int = Field(0, description="-")

    with pytest.raises(ValueError, match="a-host"):
        all_flags(Clashing)


def test_flags_of_the_default_config_build_the_default_config() -> None:
    assert load(None, given()) == ClusterConfig()
