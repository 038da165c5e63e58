"""`chairlift top`: a running server at a glance, from its metrics and its heartbeat."""

import time
from collections.abc import Iterator, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from chairlift_client.control import ControlDir, Step
from chairlift_client.scrape import Interval, scrape

BAR_WIDTH = 30
TENANTS_SHOWN = 4
_LATENCIES = (
    ("first token", "vllm:time_to_first_token_seconds"),
    ("between tokens", "vllm:inter_token_latency_seconds"),
    ("whole request", "vllm:e2e_request_latency_seconds"),
    ("in the queue", "vllm:request_queue_time_seconds"),
    ("a step", "chairlift:step_seconds"),
)


def views(
    metrics: str, model: str, control: ControlDir | None, seconds: float
) -> Iterator[RenderableType]:
    """One view after the other, ``seconds`` apart. Raises GenerateError when the server is gone."""
    last = scrape(metrics, model)
    while True:
        time.sleep(seconds)
        now = scrape(metrics, model)
        beat = control.heartbeat() if control else None
        yield view(Interval(last, now), beat.steps if beat else ())
        last = now


def view(interval: Interval, steps: Sequence[Step]) -> RenderableType:
    """Everything for one moment; rates and latencies are those of the interval."""
    left = Group(_load(interval), _traffic(interval))
    right = Group(_latencies(interval), *([_steps(steps)] if steps else []))
    return Group(_title(interval), Columns([left, right], padding=(0, 2)))


def _title(interval: Interval) -> Text:
    states = interval.after.by_label("chairlift:engine_state", "state")
    state = next((name for name, on in states.items() if on), "no engine")
    style = "bold green" if state == "serving" else "bold red"
    beat = interval.after.value("chairlift:heartbeat_age_seconds")
    return Text.assemble(
        ("chairlift top  ", "bold"),
        (state, style),
        f"  heartbeat {beat:.1f} s ago  every {interval.seconds:.1f} s, Ctrl-C ends",
    )


def _load(interval: Interval) -> Panel:
    now = interval.after
    table = _grid()
    seats = now.value("nv_trt_llm_request_metrics", request_type="max")
    running = now.value("vllm:num_requests_running")
    table.add_row("running", _bar(running / seats if seats else 0.0), f"{running:.0f}/{seats:.0f}")
    usage = now.value("vllm:kv_cache_usage_perc")
    table.add_row("KV blocks", _bar(usage), f"{usage:.0%}")
    engine = now.value("vllm:num_requests_waiting")
    triton = now.value("nv_inference_pending_request_count")
    table.add_row("waiting", "", f"{engine:.0f} in the engine, {triton:.0f} in Triton's queue")
    hits = interval.growth("vllm:prefix_cache_hits_total")
    asked = interval.growth("vllm:prefix_cache_queries_total")
    table.add_row("prefix hits", _bar(hits / asked if asked else 0.0), _share(hits, asked))
    return Panel(table, title="load", title_align="left")


def _traffic(interval: Interval) -> Panel:
    table = _grid()
    out, prompt = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
    table.add_row("generated", "", f"{interval.rate(out):.1f} tokens/s")
    table.add_row("prompts", "", f"{interval.rate(prompt):.1f} tokens/s")
    for reason in ("stop", "length", "abort", "error"):
        rate = interval.rate("vllm:request_success_total", finished_reason=reason)
        style = "red" if reason == "error" and rate else ""
        table.add_row(f"ended: {reason}", "", Text(f"{rate:.2f}/s", style=style))
    table.add_row("preempted", "", f"{interval.rate('vllm:num_preemptions_total'):.2f}/s")
    wasted = interval.growth("chairlift:wasted_tokens_total")
    computed = interval.growth("chairlift:step_tokens_total")
    table.add_row("wasted tokens", "", _share(wasted, computed))
    for tenant, rate in _busiest_tenants(interval):
        table.add_row(f"tenant {tenant}", "", f"{rate:.1f} tokens/s")
    return Panel(table, title="traffic", title_align="left")


def _busiest_tenants(interval: Interval) -> list[tuple[str, float]]:
    """Those with a name, by tokens per second."""
    name = "chairlift:tenant_generation_tokens_total"
    tenants = [t for t in interval.after.by_label(name, "tenant") if t != "none"]
    rates = [(tenant, interval.rate(name, tenant=tenant)) for tenant in tenants]
    return sorted(rates, key=lambda pair: -pair[1])[:TENANTS_SHOWN]


def _latencies(interval: Interval) -> Panel:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "p50", "p95", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    for label, name in _LATENCIES:
        marks = [interval.quantile(name, share) for share in (0.5, 0.95, 0.99)]
        table.add_row(label, *(_duration(mark) for mark in marks))
    return Panel(table, title="latencies", title_align="left")


def _steps(steps: Sequence[Step]) -> Panel:
    """The last steps, newest last: rows that decode, prompt tokens, time."""
    table = Table(box=None, pad_edge=False)
    for heading in ("decode rows", "prompt tokens", "ms"):
        table.add_column(heading, justify="right")
    for step in steps[-8:]:
        table.add_row(str(step.decodes), str(step.prompt_tokens), f"{step.milliseconds:.1f}")
    return Panel(table, title="last steps", title_align="left")


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(min_width=14)
    table.add_column()
    table.add_column(justify="right")
    return table


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(share, 1.0), width=BAR_WIDTH)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
