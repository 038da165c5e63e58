"""Every setting of the engine: read once, checked by name, never changed afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .calls import Limits

Batching = Literal["continuous", "dynamic", "static"]
QueueOrder = Literal["fcfs", "priority", "fair", "prefix"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


def _alias(name: str, *others: str) -> Any:
    return AliasChoices(name, *others)


class EngineConfig(BaseModel):
    """Names follow vLLM's where the meaning is the same; TensorRT-LLM's are accepted beside them.

    An empty string or an unfilled ``${name}`` counts as not set, so that filled-in templates of
    other backends can be kept.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    # Model
    model: str = "models/SmolLM2-135M-Instruct"
    tokenizer: str | None = Field(None, validation_alias=_alias("tokenizer", "tokenizer_dir"))
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    add_special_tokens: bool = True
    dtype: DType = "auto"
    device: str = "auto"
    threads: int = Field(0, ge=0)
    max_model_len: int | None = Field(None, ge=1)
    attention_backend: Literal["auto", "torch", "cpu", "triton"] = "auto"
    fused_modules: bool = True
    cuda_graphs: Literal["auto", "off"] = "auto"

    # KV cache
    block_size: int = Field(32, ge=1, le=256)
    num_kv_blocks: int | None = Field(None, ge=1)
    max_tokens_in_kv_cache: int | None = Field(
        None,
        ge=1,
        validation_alias=_alias("max_tokens_in_kv_cache", "max_tokens_in_paged_kv_cache"),
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        validation_alias=_alias("gpu_memory_utilization", "kv_cache_free_gpu_mem_fraction"),
    )
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_scales: str | None = None
    enable_prefix_caching: bool = Field(
        True, validation_alias=_alias("enable_prefix_caching", "enable_kv_cache_reuse")
    )

    # Scheduling
    batching: Batching = "continuous"
    batch_size: int = Field(8, ge=1)
    batch_window_ms: float = Field(100.0, ge=0)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(512, ge=1)
    long_prefill_token_threshold: int = Field(0, ge=0)
    enable_chunked_prefill: bool = Field(
        True, validation_alias=_alias("enable_chunked_prefill", "enable_chunked_context")
    )
    one_step_ahead: Literal["auto", "on", "off"] = "auto"
    kv_reserve_fraction: float = Field(1.0, ge=0, le=1)
    queue_order: QueueOrder = "fcfs"
    max_overtakes: int = Field(16, ge=0)
    priority_levels: int = Field(10, ge=1)
    default_priority_level: int = Field(5, ge=1)
    aging_s: float = Field(30.0, ge=0)
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    max_running_per_tenant: int | None = Field(None, ge=1)
    max_queued_tokens_per_tenant: int | None = Field(None, ge=1)
    max_waiting: int | None = Field(None, ge=1)
    when_full: Literal["refuse", "block"] = "refuse"
    trace: bool = False
    trace_steps: int = Field(20_000, ge=1)

    # Requests
    default_max_tokens: int = Field(16, ge=1)
    default_sampling: Literal["dialect", "greedy", "random"] = "dialect"
    dialect: Literal["trtllm", "vllm"] = "trtllm"
    stream_interval: int = Field(1, ge=1)
    max_send_share: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)

    # Life cycle
    cancellation_check_period_ms: int = Field(50, ge=1)
    limits: dict[str, int] = Field(default_factory=dict)
    drain_timeout_s: float = Field(30.0, ge=0)
    heartbeat_period_s: float = Field(0.5, gt=0)

    # What an operator sees
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = True
    log_prompts: bool = False
    report_metrics: bool = Field(
        True, validation_alias=_alias("report_metrics", "REPORT_CUSTOM_METRICS")
    )
    stats_check_period_ms: int = Field(500, ge=1)
    max_tenant_labels: int = Field(16, ge=0)
    profile_dir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if not _is_unset(v)}

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, limits: dict[str, int]) -> dict[str, int]:
        known = {field.name for field in fields(Limits)}
        for name, limit in limits.items():
            if name not in known:
                raise ValueError(f"unknown limit '{name}'; known are {', '.join(sorted(known))}")
            if limit < 1:
                raise ValueError(f"limit '{name}' must be 1 or more, got {limit}")
        return limits

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "fp8":
            raise ValueError("kv_cache_scales are for kv_cache_dtype 'fp8' alone")
        if self.default_priority_level > self.priority_levels:
            raise ValueError(
                f"default_priority_level ({self.default_priority_level}) is above priority_levels "
                f"({self.priority_levels})"
            )
        if self.when_full == "block" and self.queue_order not in ("fcfs", "priority"):
            raise ValueError(
                f"queue_order '{self.queue_order}' must see the whole queue; when_full 'block' "
                "leaves most of it with Triton"
            )
        if self.batching != "continuous" and self.queue_order != "fcfs":
            raise ValueError(
                f"queue_order '{self.queue_order}' needs continuous batching: {self.batching} "
                "batches form in order of arrival"
            )
        return self


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and (value == "" or value.startswith("${")))


def load_config(
    model_json: Path, overrides: str | None, variant: Mapping[str, str] | None = None
) -> EngineConfig:
    """Merge the settings; the command line's JSON wins over ``1/model.json``.

    ``variant`` holds the parameters of the config.pbtxt in use, which say what that file is for
    (the batching mode, the dialect); they fill what neither of the two sets. Raises ``ValueError``
    with one clause per bad key.
    """
    names = _names()
    settings: dict[str, Any] = {names[k]: v for k, v in (variant or {}).items() if k in names}
    for source, text in (
        (model_json.name, model_json.read_text() if model_json.exists() else "{}"),
        ("CHAIRLIFT_SETTINGS", overrides or "{}"),
    ):
        try:
            loaded = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}: not valid JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{source}: expected a JSON object, got {type(loaded).__name__}")
        renamed = {names.get(str(key), str(key)): value for key, value in loaded.items()}
        if len(renamed) < len(loaded):
            raise ValueError(f"{source}: a setting is given by two of its names")
        settings.update(renamed)
    try:
        return EngineConfig.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(e["loc"], e["msg"], e.get("input"), e["type"]) for e in error.errors()]
        raise ValueError("; ".join(lines)) from None


def _names() -> dict[str, str]:
    """Every name that a setting goes by, to the one it has here."""
    names: dict[str, str] = {}
    for field, info in EngineConfig.model_fields.items():
        alias = info.validation_alias
        others = alias.choices if isinstance(alias, AliasChoices) else []
        names |= dict.fromkeys([field, *map(str, others)], field)
    return names


def _explain(loc: tuple[int | str, ...], message: str, value: object, kind: str) -> str:
    name = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return f"unknown setting '{name}'"
    if not name:
        return message
    return f"setting '{name}': {message} (got {value!r})"
