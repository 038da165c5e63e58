"""What neither vLLM nor TensorRT-LLM shows: steps and their composition, waste, tenants, health."""

from __future__ import annotations

from .spec import counter, gauge, histogram

# A decode step takes 2 ms on a fast GPU with a small model, a full chunk on a CPU several seconds.
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

STATES = ("serving", "draining", "drained", "unhealthy", "stopped")
STEP_KINDS = ("decode", "prefill", "mixed")
WASTE = ("recomputed", "overrun", "aborted")
OTHER_TENANTS = "other"
NO_TENANT = "none"

STATE = gauge("chairlift:engine_state", "1 for the engine's state.", "state", STATES)
BEAT_AGE = gauge(
    "chairlift:heartbeat_age_seconds", "Since the engine's loop last turned; 0.25 when idle."
)
OPEN = gauge("chairlift:requests_open", "Clients' requests that have not had their last response.")
REFUSED = counter("chairlift:requests_refused_total", "Requests refused on arrival.", "code")

STEPS = counter("chairlift:steps_total", "Steps by what they computed.", "kind", STEP_KINDS)
STEP_SECONDS = histogram("chairlift:step_seconds", "A step's time.", _STEP_SECONDS, dense=True)
SCHEDULE_SECONDS = counter(
    "chairlift:schedule_seconds_total", "The part of the steps' time that scheduling took."
)
STEP_ROWS = histogram("chairlift:step_rows", "Sequences per step.", _ROWS, dense=True)
STEP_TOKENS = counter(
    "chairlift:step_tokens_total", "Tokens computed.", "kind", ("decode", "prefill")
)
LAST_STEP = gauge(
    "chairlift:last_step_rows", "Rows of the last step.", "kind", ("decode", "prefill")
)
WASTED = counter(
    "chairlift:wasted_tokens_total",
    "Tokens computed for nothing: again after a preemption, past a stop string, for an answer that "
    "nobody read to its end.",
    "reason",
    WASTE,
)

CACHED_BLOCKS = gauge(
    "chairlift:kv_blocks_cached", "Free KV blocks whose contents can still serve a prefix."
)
EVICTIONS = counter("chairlift:kv_evictions_total", "Cached KV blocks that were overwritten.")
COMPILED = counter("chairlift:compile_events_total", "Kernels that were loaded while serving.")

TENANT_PROMPT = counter(
    "chairlift:tenant_prompt_tokens_total",
    "Prompt tokens by tenant; 'other' is the rest.",
    "tenant",
)
TENANT_OUTPUT = counter(
    "chairlift:tenant_generation_tokens_total", "Generated tokens by tenant.", "tenant"
)

SPECS = (
    *(STATE, BEAT_AGE, OPEN, REFUSED),
    *(STEPS, STEP_SECONDS, SCHEDULE_SECONDS, STEP_ROWS, STEP_TOKENS, LAST_STEP, WASTED),
    *(CACHED_BLOCKS, EVICTIONS, COMPILED, TENANT_PROMPT, TENANT_OUTPUT),
)
