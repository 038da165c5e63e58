"""What a real server shows of itself agrees with what its clients saw."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from chairlift.metric_names import ALL
from chairlift_client.admin import GRPC_HEADER, HEADER, KEY_FILE
from chairlift_client.scrape import Interval
from tests.server.harness import ServerProcess, wait_for
from tests.server.scrapes import complete, grown, scrape, settled
from tests.server.talk import generate, heartbeat, stream, wait_drained
from tests.unit.test_deploy import TRITONS_OWN

SUCCESS = "vllm:request_success_total"
COUNTS = {
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_finish_reason": True,
}


class Seen(NamedTuple):
    """What a client knows of its request; times in seconds."""

    prompt_tokens: int
    output_tokens: int
    reasons: list[str]
    first: float
    total: float


def client(server: ServerProcess, body: dict[str, Any]) -> Seen:
    began = time.monotonic()
    first, events = 0.0, []
    for event in stream(server, **COUNTS, **body):
        first = first or time.monotonic() - began
        events.append(event)
    return Seen(
        events[0]["num_input_tokens"],
        sum(event["num_output_tokens"] for event in events),
        [e["finish_reason"] for e in events if e["finish_reason"] != "None"],
        first,
        time.monotonic() - began,
    )


def test_counts_and_times_agree_with_the_clients(server: ServerProcess) -> None:
    bodies: list[dict[str, Any]] = [
        {"text_input": "Count. " * i, "max_tokens": 4 + 3 * i, "temperature": 0.0, "tenant": "acme"}
        for i in range(1, 7)
    ]
    bodies.append({"text_input": "The capital of France is", "max_tokens": 9, "stop_words": ["Pa"]})
    bodies.append({"text_input": "Two", "max_tokens": 5, "num_return_sequences": 2, "seed": 3})
    before = settled(server)
    with ThreadPoolExecutor(len(bodies)) as pool:
        seen = list(pool.map(lambda body: client(server, body), bodies))
    answers = sum(len(each.reasons) for each in seen)
    assert answers == len(bodies) + 1
    interval = grown(server, before, SUCCESS, answers)
    growth = interval.growth

    assert growth(SUCCESS) == answers
    for reason, number in Counter(r for each in seen for r in each.reasons).items():
        assert growth(SUCCESS, finished_reason=reason) == number
    tokens = sum(each.output_tokens for each in seen)
    assert growth("vllm:prompt_tokens_total") == sum(each.prompt_tokens for each in seen)
    assert growth("vllm:generation_tokens_total") == tokens
    assert growth("vllm:inter_token_latency_seconds_count") == tokens - answers
    assert growth("vllm:time_per_output_token_seconds_count") == tokens - answers
    assert growth("nv_llm_output_token_len_sum") == tokens
    assert growth("vllm:request_params_max_tokens_sum") == sum(b["max_tokens"] for b in bodies)
    assert growth("vllm:request_params_n_sum") == answers
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert growth(f"vllm:{histogram}_seconds_count") == len(bodies), histogram
    assert growth("chairlift:tenant_generation_tokens_total", tenant="acme") == sum(
        each.output_tokens for each in seen[:6]
    )
    check_times(interval, seen)


def check_times(interval: Interval, seen: list[Seen]) -> None:
    """A server's times lie within its clients', and its parts make up its whole."""

    def total(name: str) -> float:
        return interval.growth(f"vllm:{name}_seconds_sum")

    assert 0 < total("time_to_first_token") <= sum(each.first for each in seen)
    assert 0 < total("e2e_request_latency") <= sum(each.total for each in seen)
    parts = total("request_queue_time") + total("request_prefill_time")
    assert parts == pytest.approx(total("time_to_first_token"), abs=1e-5)
    whole = parts + total("request_decode_time")
    assert whole == pytest.approx(total("e2e_request_latency"), abs=1e-5)


def test_prefix_hits_are_the_blocks_that_the_client_was_told(server: ServerProcess) -> None:
    body = {"text_input": "All about lifts, " * 60, "max_tokens": 2, "return_perf_metrics": True}
    generate(server, **body)
    before = settled(server)
    reply = generate(server, **body)
    interval = grown(server, before, SUCCESS, 1)
    reused = reply.body["kv_cache_reused_blocks"]
    assert reused >= 5
    assert interval.growth("vllm:prefix_cache_hits_total") == 32 * reused
    assert interval.growth("vllm:prompt_tokens_cached_total") == 32 * reused


def test_levels_follow_a_request_and_its_cancellation_counts_as_abort(
    server: ServerProcess,
) -> None:
    before = settled(server)
    events = stream(server, text_input="Count: 1 2 3", max_tokens=4000, ignore_eos=True)
    next(events)
    running = complete(server)
    assert running.value("vllm:num_requests_running") == 1
    assert 0 < running.value("vllm:kv_cache_usage_perc") < 1
    assert running.value("nv_trt_llm_request_metrics", request_type="active") == 1
    assert running.value("chairlift:engine_state", state="serving") == 1
    events.close()
    interval = grown(server, before, SUCCESS, 1, finished_reason="abort")
    assert interval.growth(SUCCESS) == 1
    wait_drained(server)
    wait_for("nothing to run", lambda: scrape(server).value("vllm:num_requests_running") == 0)


def test_refusals_are_counted_and_end_nothing(server: ServerProcess) -> None:
    before = settled(server)
    assert generate(server, text_input="x", temperature=-1.0).status == 400
    interval = grown(server, before, "chairlift:requests_refused_total", 1, code="invalid_arg")
    assert interval.growth(SUCCESS) == 0


def test_every_metric_is_there_under_its_name(server: ServerProcess) -> None:
    generate(server, text_input="x", max_tokens=0)
    exposed = {name for spec in ALL for name in spec.exposed()}
    wait_for("all names", lambda: exposed <= scrape(server).names, 10.0)
    assert scrape(server).names >= TRITONS_OWN, "names that deploy/ uses"
    blocks = scrape(server).by_label("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type")
    assert set(blocks) == {"max", "free", "used", "tokens_per", "reused", "fraction"}
    assert blocks["tokens_per"] == 32 and blocks["max"] > 0


def test_one_log_line_per_request_and_no_prompt(server: ServerProcess) -> None:
    secret = "velvet-hippopotamus"
    body = {"id": "log-me-7", "text_input": f"I like the {secret}.", "max_tokens": 3}
    assert generate(server, **body).status == 200
    assert generate(server, **body, temperature=9e9).status == 400
    wait_for("its line", lambda: "request_id=log-me-7" in server.log(), 10.0)
    lines = [line for line in server.log().splitlines() if "log-me-7" in line]
    assert len(lines) == 1 and "finish=length" in lines[0] and "output_tokens=3" in lines[0]
    assert secret not in server.log()


ADMIN_PATHS = ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status")


def _status(server: ServerProcess, path: str, headers: dict[str, str], method: str = "GET") -> int:
    request = Request(server.http + path, headers=headers, method=method)
    try:
        with urlopen(request, timeout=10) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def test_administration_needs_the_key(server: ServerProcess) -> None:
    key = (server.control.path / KEY_FILE).read_text()
    assert {_status(server, path, {}) for path in ADMIN_PATHS} == {403}
    assert {_status(server, path, {HEADER: "guessed"}) for path in ADMIN_PATHS} == {403}
    assert {_status(server, path, {HEADER: key}) for path in ADMIN_PATHS} == {200}
    assert _status(server, "/v2/repository/index", {}, "POST") == 403
    assert _status(server, "/v2/models/llm/config", {}) == 200
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        calls: tuple[Callable[..., object], ...] = (
            client.get_model_repository_index,
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
        )
        for call in calls:
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
            call(headers={GRPC_HEADER: key})


def _chairlift(*arguments: str) -> str:
    command = [sys.executable, "-m", "chairlift_client", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_top_and_profile_show_a_server_at_work(server: ServerProcess) -> None:
    control = ("--control", str(server.control.path))
    events = stream(server, text_input="Count: 1 2 3", max_tokens=4000, ignore_eos=True)
    next(events)
    url = f"http://127.0.0.1:{server.metrics_port}"
    shown = _chairlift("top", "--once", "--interval", "1", "--metrics", url, *control)
    report = _chairlift("profile", "3", *control)
    events.close()
    for words in ("serving", "running", "1/64", "tokens/s", "between tokens", "last steps"):
        assert words in shown, (words, shown)
    assert report.startswith("3 steps in ") and "aten::" in report
    folder = Path(report.splitlines()[-1].split(":")[0])
    assert {p.name for p in folder.iterdir()} == {"operators.txt", "steps.jsonl", "trace.json"}
    wait_drained(server)


def test_settings_of_an_operator(start_server: Callable[..., ServerProcess]) -> None:
    """Metrics off, log in JSON with prompts, a limit lowered, administration open: all at once."""
    server = start_server(
        "--no-greet",
        "--open-admin",
        *("--set", "log_format=json"),
        *("--set", "log_prompts=true"),
        *("--set", 'limits={"prompt_bytes": 100}'),
        "--server-arg=--allow-metrics=false",
    )
    assert generate(server, id="j1", text_input="Once upon", max_tokens=4).status == 200
    refused = generate(server, text_input="x" * 101, max_tokens=4)
    assert refused.status == 400 and "100" in refused.body["error"]
    assert not (server.control.path / KEY_FILE).exists()
    assert {_status(server, path, {}) for path in ADMIN_PATHS} == {200}
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5)
    wait_for("the request's line", lambda: '"request_id": "j1"' in server.log(), 10.0)
    (line,) = [line for line in server.log().splitlines() if '"request_id": "j1"' in line]
    entry = json.loads(line)
    assert (entry["finish"], entry["output_tokens"]) == ("length", 4)
    assert entry["prompt"] == "Once upon"
    assert heartbeat(server)["state"] == "serving"
