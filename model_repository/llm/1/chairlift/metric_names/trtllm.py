"""TensorRT-LLM's metrics, label values and all: its checkers fail on a value they do not know.

Triton's HTTP frontend makes the ORCA header ``endpoint-load-metrics`` from ``KV_BLOCKS``.
"""

from __future__ import annotations

from .spec import Kind, Spec, counter, gauge

REQUESTS = gauge(
    "nv_trt_llm_request_metrics",
    "TRT LLM request metrics",
    "request_type",
    ("active", "max", "scheduled", "context", "waiting"),
)
RUNTIME_MEMORY = gauge(
    "nv_trt_llm_runtime_memory_metrics",
    "TRT LLM runtime memory metrics",
    "memory_type",
    ("cpu", "gpu", "pinned"),
)
KV_BLOCKS = gauge(
    "nv_trt_llm_kv_cache_block_metrics",
    "TRT LLM KV cache block metrics",
    "kv_cache_block_type",
    ("max", "free", "used", "tokens_per", "reused", "fraction"),
)
INFLIGHT_BATCHER = gauge(
    "nv_trt_llm_inflight_batcher_metrics",
    "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
    ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
)
GENERAL = gauge(
    "nv_trt_llm_general_metrics",
    "General TRT LLM metrics",
    "general_type",
    ("timestamp", "iteration_counter"),
)
DISAGGREGATED = counter(
    "nv_trt_llm_disaggregated_serving_metrics",
    "TRT LLM disaggregated serving metrics",
    "disaggregated_serving_type",
    ("kv_cache_transfer_ms", "request_count"),
)

_LENGTHS = (10.0, 50.0, 100.0, 500.0, 1000.0)
OUTPUT_LENGTH = Spec(
    "nv_llm_output_token_len",
    Kind.HISTOGRAM,
    "TRT LLM response metrics",
    "response_metric_type",
    ("total_output_tokens",),
    _LENGTHS,
)
INPUT_LENGTH = Spec(
    "nv_llm_input_token_len",
    Kind.HISTOGRAM,
    "TRT LLM response metrics",
    "response_metric_type",
    ("total_input_tokens",),
    _LENGTHS,
)

SPECS = (
    *(REQUESTS, RUNTIME_MEMORY, KV_BLOCKS, INFLIGHT_BATCHER, GENERAL, DISAGGREGATED),
    *(OUTPUT_LENGTH, INPUT_LENGTH),
)
