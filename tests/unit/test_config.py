"""The configuration file: what it accepts, and how exactly it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from cluster.config import ClusterConfig, dump, leaves, load
from cluster.failures import ConfigError
from workers.overlap.plan import CHUNK_COUNTS
from workers.placement import OverlapMode


def config_file(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(config_file(folder, text))
    return list(caught.value.problems)


def test_no_file_and_no_flags_are_the_defaults() -> None:
    assert load() == ClusterConfig()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(config_file(tmp_path, "# nothing yet\n")) == ClusterConfig()


def test_dumped_config_reads_back_equal(tmp_path: Path) -> None:
    config = load(
        None, {"replicas": 3, "engine": {"engine_args": {"quantization": "fp8"}}, "router": {"port": 0}}
    )
    assert load(config_file(tmp_path, dump(config))) == config


def test_overrides_win_over_the_file_and_leave_the_rest_of_it(tmp_path: Path) -> None:
    path = config_file(tmp_path, "replicas: 4\nengine: {dtype: float32, max_model_len: 512}\n")
    config = load(path, {"engine": {"max_model_len": 1024}})
    assert (config.replicas, config.engine.dtype, config.engine.max_model_len) == (4, "float32", 1024)


def test_one_engine_argument_flag_keeps_the_others_of_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, "engine: {engine_args: {block_size: 16, seed: 1}}\n")
    config = load(path, {"engine": {"engine_args": {"seed": 2}}})
    assert config.engine.engine_args == {"block_size": 16, "seed": 2}


def test_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "replicas: 1\nengine:\n  max_modle_len: 512\n")
    assert problem.endswith("cluster.yaml:3: engine.max_modle_len: unknown key; did you mean max_model_len?")


def test_key_in_the_wrong_section_is_told_where_it_belongs(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "tensor_parallel_size: 2\n")
    assert "did you mean engine.tensor_parallel_size?" in problem


def test_key_that_resembles_nothing_lists_what_there_is(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "xyzzy: 2\n")
    assert "unknown key; known here: name, replicas" in problem


def test_every_wrong_value_gets_a_line_of_its_own(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, "replicas: 0\nrouter:\n  port: 70000\n  policy: magic\n")
    assert [problem.split(": ")[1] for problem in problems] == ["replicas", "router.port", "router.policy"]
    assert all("\n" not in problem for problem in problems)
    assert "(got 70000)" in problems[1]


def test_rule_over_several_fields_names_its_section(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "router:\n  tls_cert: a.pem\n")
    assert "cluster.yaml:1: router: tls_cert and tls_key go together" in problem


def test_error_of_a_flag_does_not_blame_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file(tmp_path, "replicas: 2\n"), {"replicas": -1})
    assert caught.value.problems[0].startswith("replicas: ")


def test_key_set_twice_is_refused(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "replicas: 1\nreplicas: 2\n")
    assert problem.endswith("cluster.yaml:2: replicas is set already on line 1")


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "replicas: 1\nengine: [\n")
    assert "cluster.yaml:3: not YAML" in problem


def test_yaml_tags_construct_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    [problem] = problems_of(tmp_path, f"name: !!python/object/apply:os.system ['touch {marker}']\n")
    assert "not YAML" in problem
    assert not marker.exists()


def test_a_list_is_not_a_configuration(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "- replicas\n")
    assert "expected a mapping of settings, found list" in problem


def test_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration nowhere\.yaml: No such file"):
        load(Path("nowhere.yaml"))


@pytest.mark.parametrize("name", ["", "Upper", "-dash", "a/b", "x" * 33])
def test_cluster_names_that_cannot_be_file_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use lower-case letters"):
        load(None, {"name": name})


def test_relative_paths_of_the_file_are_taken_from_its_folder(tmp_path: Path) -> None:
    config = load(
        config_file(tmp_path, "router: {api_keys_file: keys}\nengine: {lora_modules: {a: loras/a}}\n")
    )
    assert config.router.api_keys_file == tmp_path / "keys"
    assert config.engine.lora_modules == {"a": str(tmp_path / "loras" / "a")}


def test_relative_model_folder_is_made_absolute_and_a_name_is_not(tmp_path: Path) -> None:
    assert load(config_file(tmp_path, "engine: {model: ./ckpt}\n")).engine.model == str(tmp_path / "ckpt")
    assert load(config_file(tmp_path, "engine: {model: org/name}\n")).engine.model == "org/name"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("off", "off"), ("'off'", "off"), ("4", "4"), ("'4'", "4"), ("1", "1"), ("auto", "auto")],
)
def test_overlap_may_be_written_as_yaml_likes_it(tmp_path: Path, written: str, meant: str) -> None:
    path = config_file(tmp_path, f"engine: {{tensor_parallel_size: 2, overlap: {written}}}\n")
    assert load(path).engine.overlap == meant
    assert load(config_file(tmp_path, dump(load(path)))).engine.overlap == meant


def test_overlap_modes_are_the_chunk_counts_a_plan_may_have() -> None:
    assert get_args(OverlapMode) == ("auto", "off", *(str(count) for count in CHUNK_COUNTS))


@pytest.mark.parametrize("written", ["5", "0", "-2", "on", "2.0", "[4]", "null"])
def test_overlap_out_of_range_is_refused_with_its_line_and_what_there_is(
    tmp_path: Path, written: str
) -> None:
    [problem] = problems_of(tmp_path, f"engine:\n  tensor_parallel_size: 2\n  overlap: {written}\n")
    assert (
        "cluster.yaml:3: engine.overlap: input should be 'auto', 'off', '1', '2', '3', '4', '6' or '8'"
        in problem
    )


def test_forced_chunks_need_several_shards_that_split_each_layer(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "engine:\n  overlap: 4\n")
    assert "cluster.yaml:2: engine.overlap: 4 chunks hide AllReduce between tensor-parallel shards" in problem
    assert "tensor_parallel_size is 1: raise it, or use auto or off" in problem
    assert load(config_file(tmp_path, "engine: {overlap: 1}\n")).engine.overlap == "1"


def test_forced_chunks_need_all_layers_in_one_stage(tmp_path: Path) -> None:
    text = "engine: {tensor_parallel_size: 2, pipeline_parallel_size: 3, overlap: 2}\n"
    [problem] = problems_of(tmp_path, text)
    assert "pipeline_parallel_size is 3: make it 1, or use auto or off" in problem


def test_wrong_parallel_size_is_one_problem_not_two(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "engine: {tensor_parallel_size: 0, overlap: 4}\n")
    assert "engine.tensor_parallel_size" in problem


def test_every_field_describes_itself() -> None:
    assert [".".join(path) for path, field in leaves() if not field.description] == []


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ClusterConfig().replicas = 3  # type: ignore[misc]


def test_dump_is_plain_yaml() -> None:
    assert yaml.safe_load(dump(ClusterConfig()))["router"]["port"] == 50051
