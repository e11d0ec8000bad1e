"""Settings of one replica's engine, validated once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from workers.placement import OverlapMode


class EngineConfig(BaseModel):
    """What every replica runs. Sizes are tokens unless named otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "smollm2", description="a name from `kvorum model list`, a checkpoint folder or a hub id"
    )
    served_name: str | None = Field(None, description="name clients ask for; the model's own name by default")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what the shards run on")
    tensor_parallel_size: int = Field(1, ge=1, description="shards that split each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="stages that split the layers")
    cores_per_shard: int | None = Field(
        None, ge=1, description="CPU cores each shard is pinned to; shared out by default"
    )
    max_model_len: int | None = Field(
        None, ge=16, description="longest prompt plus output; the model's own by default"
    )
    kv_cache_gib: float = Field(
        1.0, gt=0, description="KV cache of one shard in GiB (CPU; on CUDA vLLM sizes it)"
    )
    dtype: str = Field(
        "auto",
        description="weights and activations; auto is the checkpoint's, and float32 on x86 without AVX-512",
    )
    max_num_seqs: int = Field(32, ge=1, description="sequences batched in one engine step")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        description="tokens computed in one engine step; 512 on CPU, so that a cancel frees blocks in 1 s",
    )
    compile: bool = Field(
        False, description="torch.compile: 15-20 %% faster, about 40 s more to start on CPU"
    )
    lora_modules: dict[str, str] = Field(default_factory=dict, description="adapter name=folder")
    collective: Literal["auto", "nccl", "shm", "gloo"] = Field("auto", description="what carries AllReduce")
    overlap: OverlapMode = Field(
        "auto",
        description="chunks a step is split into, so that AllReduce runs while others compute; auto measures",
    )
    kv_events: bool = Field(
        True, description="follow what the engine's KV cache holds, which routing by prefix needs"
    )
    kv_pool_gib: float = Field(
        0.0, ge=0, description="memory of each host that its replicas share KV blocks in, in GiB; 0: none"
    )
    kv_pool_folder: str | None = Field(
        None, description="folder on each host for that memory, per cluster; /dev/shm by default"
    )
    kv_pool_admission: Literal["lru", "tinylfu"] = Field(
        "lru", description="whether a full pool takes in every new block, or those asked for more often only"
    )
    kv_pool_pull_timeout_s: float = Field(
        5.0, gt=0, description="how long a request waits at most for KV blocks from another host"
    )
    drain_grace_s: float = Field(30.0, ge=0, description="how long a draining replica lets requests finish")
    start_timeout_s: float = Field(600.0, gt=0, description="a replica that is not ready by then has failed")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="any further vLLM engine argument, by its Python name"
    )

    @field_validator("overlap", mode="before")
    @classmethod
    def _overlap_as_text(cls, value: Any) -> Any:
        if value is False:  # what YAML makes of a bare `off`
            return "off"
        return str(value) if type(value) is int else value

    @field_validator("overlap")
    @classmethod
    def _overlap_has_what_it_needs(cls, value: OverlapMode, info: ValidationInfo) -> OverlapMode:
        if not value.isdigit() or value == "1":
            return value
        if info.data.get("tensor_parallel_size") == 1:
            raise ValueError(
                f"{value} chunks hide AllReduce between tensor-parallel shards, "
                "and tensor_parallel_size is 1: raise it, or use auto or off"
            )
        if (stages := info.data.get("pipeline_parallel_size", 1)) > 1:
            raise ValueError(
                f"{value} chunks need all layers in one stage, and pipeline_parallel_size is {stages}: "
                "make it 1, or use auto or off"
            )
        return value
