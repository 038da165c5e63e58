"""The engine on a GPU with random models: a decode step against its floor, and whole workloads.

    python -m perf.gpu.end_to_end [--out perf/results/gpu-end-to-end] [--layers 16]
    python -m perf.gpu.end_to_end --smoke --out smoke

with PYTHONPATH=model_repository/llm/1:client:kernels:. from the checkout.

Three tables: the step of an 8B shape (its first --layers layers) over the time that reading its
weights and its keys and values takes at the rate of a copy; nano-vllm's public recipe (256 requests
of 100 to 1,024 tokens in and out, seed 0, a Qwen3-0.6B shape), continuous against static batching;
and that recipe without graphs and without a step ahead. --smoke tries the script on the CPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from chairlift.memory import kv_bytes_per_token
from perf.gpu.tables import write_tables
from perf.gpu.timing import Bench, Table, Value, measure_ceilings
from perf.measuring.own_engine import OwnEngine
from perf.measuring.workload import WorkRequest

STEP_AIM = 1.25


class Model(NamedTuple):
    """A transformers model type, its shape, and a small one for trying the script."""

    kind: str
    shape: Mapping[str, Any]

    def small(self) -> Model:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        return Model(self.kind, {**self.shape, **tiny, **heads, "vocab_size": 200})


QWEN3_06B = Model("qwen3", {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
})  # fmt: skip
LLAMA_8B = Model("llama", {
    "hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
    "max_position_embeddings": 16_384,
})  # fmt: skip


def make(model: Model, bench: Bench, folder: Path) -> LoadedModel:
    """Random weights by way of a checkpoint, so that loading is what it is in service."""
    if bench.smoke:
        model = model.small()
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(model.kind, **{**model.shape, **ends})
    dtype = torch.float32 if bench.smoke else torch.bfloat16
    with torch.device(bench.device):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    backend = "torch" if bench.smoke else "triton"
    return loader.load(EngineConfig(model=str(folder), attention_backend=backend))


def recipe(bench: Bench, vocab_size: int) -> list[WorkRequest]:
    """nano-vllm's bench.py, as published: lengths uniform in 100..1024, random ids."""
    rng = random.Random(0)
    count, low, high = (6, 3, 12) if bench.smoke else (256, 100, 1024)
    return [
        WorkRequest([rng.randrange(vocab_size) for _ in range(rng.randint(low, high))], tokens)
        for tokens in [rng.randint(low, high) for _ in range(count)]
    ]


def serve(loaded: LoadedModel, requests: list[WorkRequest], settings: Mapping[str, Any]) -> float:
    """Seconds for all requests, submitted at once; the engine is warm."""
    engine = OwnEngine(settings, loaded=loaded)
    try:
        engine.run([WorkRequest([1, 2, 3], 4)])
        begin = time.perf_counter()
        engine.run(requests)
        return time.perf_counter() - begin
    finally:
        engine.close()


def throughput(bench: Bench, loaded: LoadedModel) -> list[Table]:
    requests = recipe(bench, loaded.vocab_size)
    tokens = sum(request.max_tokens for request in requests)
    base = {"max_num_seqs": bench.pick(256, 4), "max_num_batched_tokens": bench.pick(16_384, 64)}
    if bench.smoke:
        base["num_kv_blocks"] = 40
    static = {"batching": "static", "batch_size": bench.pick(256, 4), "max_waiting": 1024}
    tables = []
    for title, ways in (
        ("Batching", {"continuous": {}, "static": static}),
        ("Switches", {
            "no graphs": {"cuda_graphs": "off"}, "no step ahead": {"one_step_ahead": "off"},
            "neither": {"cuda_graphs": "off", "one_step_ahead": "off"},
        }),
    ):  # fmt: skip
        rows = []
        for name, settings in ways.items():
            seconds = serve(loaded, requests, {**base, **settings})
            bench.forget()
            row: dict[str, Value] = {"way": name, "seconds": round(seconds, 2)}
            rows.append(row | {"output tokens/s": round(tokens / seconds)})
        note = f"{len(requests)} requests, greedy, {tokens:,} output tokens"
        tables.append(Table(title, note, rows))
    return tables


def decode_steps(bench: Bench, loaded: LoadedModel, copy_gb_s: float) -> Table:
    """Medians of the time between the ends of decode steps."""
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    embedding = loaded.model.get_input_embeddings().weight
    weights -= embedding.numel() * embedding.element_size()  # a few rows of it are read
    per_token = kv_bytes_per_token(loaded.layers, loaded.dtype.itemsize)
    rows = []
    for batch, keys in ((1, 8), (2, 8)) if bench.smoke else ((1, 1024), (64, 1024), (64, 4096)):
        stats: list[Any] = []
        settings: dict[str, Any] = {"max_num_seqs": batch, "max_num_batched_tokens": 4096}
        if bench.smoke:
            settings["num_kv_blocks"] = 40
        engine = OwnEngine(settings, loaded=loaded, on_step=stats.append)
        try:
            engine.run([WorkRequest([1 + i] * keys, bench.pick(48, 6)) for i in range(batch)])
        finally:
            engine.close()
        del engine
        bench.forget()
        pairs = zip(stats, stats[1:], strict=False)
        full = [b.finished - a.finished for a, b in pairs if b.num_decodes == batch]
        floor = (weights + batch * keys * per_token) / copy_gb_s / 1e9
        step = statistics.median(full)
        row: dict[str, Value] = {"rows": batch, "keys": keys, "step ms": round(step * 1e3, 3)}
        row |= {"floor ms": round(floor * 1e3, 3), "step / floor": round(step / floor, 2)}
        rows.append(row | {"aim": "met" if step <= STEP_AIM * floor else "missed"})
    note = f"{len(loaded.layers)} layers; {weights / 1e9:.2f} GB of weights are read each step"
    return Table("Decode step of an 8B shape", note, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("perf/results/gpu-end-to-end"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(torch.device("cpu" if options.smoke else "cuda"), options.smoke)
    ceilings, first = measure_ceilings(bench)
    tables = [first]
    deep = Model(LLAMA_8B.kind, {**LLAMA_8B.shape, "num_hidden_layers": options.layers})
    for model, measure in (
        (QWEN3_06B, lambda loaded: throughput(bench, loaded)),
        (deep, lambda loaded: [decode_steps(bench, loaded, ceilings.copy_gb_s)]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            loaded = make(model, bench, Path(folder))
        tables += measure(loaded)
        write_tables("End to end on a GPU", bench, tables, options.out)
        del loaded
        bench.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
