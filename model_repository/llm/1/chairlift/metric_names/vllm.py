"""vLLM's metrics: its names, its meanings (V1 engine), and its buckets with finer ones below them.

Counts are of requests as the engine knows them: one per row of a client's request, whose n answers
share prompt, queue and first-token time. Times begin where Triton hands a request over; its own
queue is in nv_inference_pending_request_count and nv_inference_queue_duration_us.
"""

from __future__ import annotations

from .spec import counter, gauge, histogram

# vLLM begins at 10 ms between tokens and 300 ms per request, where a small model has long finished.
# fmt: off
_INTERVALS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_FIRST_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_LATENCIES = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_LENGTHS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")

RUNNING = gauge("vllm:num_requests_running", "Requests in the running batch.")
WAITING = gauge("vllm:num_requests_waiting", "Requests in the engine that wait to board.")
KV_USAGE = gauge("vllm:kv_cache_usage_perc", "Fraction of the KV blocks in use, 0 to 1.")
CACHE_CONFIG = gauge("vllm:cache_config_info", "The KV cache's settings, as labels.", "block_size")

PREEMPTIONS = counter("vllm:num_preemptions_total", "Requests that lost their blocks to others.")
PREFIX_QUERIES = counter(
    "vllm:prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache."
)
PREFIX_HITS = counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
PROMPT_TOKENS = counter(
    "vllm:prompt_tokens_total", "Tokens of the prompts, cached ones among them."
)
CACHED_TOKENS = counter("vllm:prompt_tokens_cached_total", "Prompt tokens that were not computed.")
GENERATION_TOKENS = counter("vllm:generation_tokens_total", "Tokens generated.")
SUCCESS = counter(
    "vllm:request_success_total",
    "Answers that ended, by reason; abort is the client's doing.",
    "finished_reason",
    FINISH_REASONS,
)

FIRST_TOKEN = histogram(
    "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
)
INTER_TOKEN = histogram(
    "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _INTERVALS, dense=True
)
PER_OUTPUT_TOKEN = histogram(
    "vllm:time_per_output_token_seconds",
    "The same under the name that vllm_backend uses: tokens - 1 observations per answer.",
    _INTERVALS,
    dense=True,
)
REQUEST_PER_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds",
    "A request's decode time per token after the first.",
    _INTERVALS,
)
LATENCY = histogram(
    "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _LATENCIES
)
QUEUE_TIME = histogram(
    "vllm:request_queue_time_seconds", "From arrival to the first step.", _LATENCIES
)
INFERENCE_TIME = histogram(
    "vllm:request_inference_time_seconds", "From the first step to the last token.", _LATENCIES
)
PREFILL_TIME = histogram(
    "vllm:request_prefill_time_seconds", "From the first step to the first token.", _LATENCIES
)
DECODE_TIME = histogram(
    "vllm:request_decode_time_seconds", "From the first to the last token.", _LATENCIES
)
REQUEST_PROMPT = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _LENGTHS)
REQUEST_GENERATION = histogram(
    "vllm:request_generation_tokens", "Tokens generated per request.", _LENGTHS
)
REQUEST_COMPUTED = histogram(
    "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request.", _LENGTHS
)
PARAMS_N = histogram("vllm:request_params_n", "Answers asked for.", _SAMPLES)
PARAMS_MAX_TOKENS = histogram("vllm:request_params_max_tokens", "max_tokens asked for.", _LENGTHS)
STEP_TOKENS = histogram(
    "vllm:iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS, dense=True
)

SPECS = (
    *(RUNNING, WAITING, KV_USAGE, CACHE_CONFIG),
    *(PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, PROMPT_TOKENS, CACHED_TOKENS),
    *(GENERATION_TOKENS, SUCCESS),
    *(FIRST_TOKEN, INTER_TOKEN, PER_OUTPUT_TOKEN, REQUEST_PER_TOKEN, LATENCY, QUEUE_TIME),
    *(INFERENCE_TIME, PREFILL_TIME, DECODE_TIME, REQUEST_PROMPT, REQUEST_GENERATION),
    *(REQUEST_COMPUTED, PARAMS_N, PARAMS_MAX_TOKENS, STEP_TOKENS),
)
