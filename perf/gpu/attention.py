"""Paged attention against copy and matmul ceilings, torch's SDPA, and FlashInfer if present."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from chairlift_kernels.kv_cache import FP8, KvCache
from chairlift_kernels.ops import TritonOps
from perf.gpu.timing import Bench, Ceilings, Table

BLOCK_SIZE = 32
# Three times an H200's L2: with less between two reads of a layer, that is what is measured.
COLD_BYTES = 180e6
DECODE_AIM, PREFILL_AIM = 0.8, 350


class Case(NamedTuple):
    """Rows of equal length; prefill rows have `queries` new tokens."""

    name: str
    rows: int
    keys: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int | None = None
    cache_dtype: torch.dtype = torch.bfloat16

    def visible_pairs(self) -> int:
        """Pairs of query and key that count, over all rows."""
        first = self.keys - self.queries + 1
        pairs = (min(n, self.window or n) for n in range(first, self.keys + 1))
        return self.rows * sum(pairs)

    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode step has to read."""
        keys = min(self.keys, self.window or self.keys)
        return self.rows * keys * self.kv_heads * 2 * self.size * self.cache_dtype.itemsize

    def flops(self) -> int:
        return 4 * self.heads * self.size * self.visible_pairs()


DECODE = [
    Case("8B shape", 1, 8192), Case("8B shape", 1, 65_536), Case("8B shape", 8, 8192),
    Case("8B shape", 64, 1024), Case("8B shape", 64, 8192), Case("8B shape", 256, 2048),
    Case("0.6B shape", 64, 1024, heads=16), Case("no GQA", 16, 4096, heads=8),
    Case("window 4096", 64, 8192, window=4096), Case("D 64", 64, 8192, size=64),
    Case("D 256", 32, 8192, heads=16, size=256), Case("e4m3", 64, 8192, cache_dtype=FP8),
]  # fmt: skip
PREFILL = [
    Case("one prompt", 1, 8192, 8192), Case("one prompt", 1, 2048, 2048),
    Case("prompts", 16, 512, 512), Case("chunk behind 30 k", 1, 32_768, 2048),
    Case("D 64", 1, 8192, 8192, size=64), Case("D 256", 1, 8192, 8192, heads=16, size=256),
    Case("window 1024", 1, 8192, 8192, window=1024),
    Case("e4m3", 1, 8192, 8192, cache_dtype=FP8),
]  # fmt: skip


class Prepared(NamedTuple):
    """A case on the device, with as many layers of cache as the L2 needs to forget one."""

    case: Case
    q: torch.Tensor
    cache: KvCache
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    def attend(self, ops: TritonOps, layer: int = 0) -> torch.Tensor:
        decode = self.case.queries == 1
        return ops.attend(
            self.q, self.cache, layer, self.tables, self.starts, self.lengths,
            num_decodes=self.case.rows if decode else 0, max_query_len=self.case.queries,
            max_seq_len=self.case.keys, scale=self.case.size**-0.5, window=self.case.window,
        )  # fmt: skip

    def seconds(self, bench: Bench, ops: TritonOps) -> float:
        layers = range(len(self.cache.layers))
        return bench.seconds([lambda layer=layer: self.attend(ops, layer) for layer in layers])


def prepare(bench: Bench, ops: TritonOps, case: Case) -> Prepared:
    """Random contents over shuffled blocks."""
    if bench.smoke:
        keys, queries = (530, 1) if case.queries == 1 else (20, min(case.queries, 9))
        case = case._replace(rows=1, keys=keys, queries=queries, heads=2, kv_heads=1, size=64)
    blocks = -(-case.keys // BLOCK_SIZE)
    layers = 1 if bench.smoke else max(1, round(COLD_BYTES / case.kv_bytes()))
    shape = (case.kv_heads, case.size, case.size)
    pool = case.rows * blocks + 1
    cache = ops.allocate_cache([shape] * layers, pool, BLOCK_SIZE, case.cache_dtype)
    for layer in cache.layers:
        for part in layer[:2]:
            part.copy_(torch.randn(part.shape[1:], device=bench.device).expand_as(part))
    tables = torch.randperm(pool - 1, device=bench.device)[: case.rows * blocks] + 1
    starts = torch.arange(case.rows + 1, device=bench.device) * case.queries
    lengths = torch.full((case.rows,), case.keys, device=bench.device)
    q = torch.randn(case.rows * case.queries, case.heads, case.size, device=bench.device)
    # The interpreter's bf16 is not hardware's; it only has to run there.
    q = q.to(torch.float16 if bench.smoke else torch.bfloat16)
    return Prepared(
        case, q, cache, tables.view(case.rows, blocks).int(), starts.int(), lengths.int()
    )


def sdpa_seconds(bench: Bench, case: Case) -> float | None:
    """torch's own attention on keys and values side by side; decode and whole prompts only."""
    if case.window or case.cache_dtype == FP8 or case.queries not in (1, case.keys) or bench.smoke:
        return None
    shape = (case.rows, case.kv_heads, case.keys, case.size)
    k, v = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    q = k.new_empty(case.rows, case.heads, case.queries, case.size).normal_()
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = case.queries > 1
    return bench.seconds([lambda: attend(q, k, v, is_causal=causal, enable_gqa=True)])


def flashinfer_seconds(bench: Bench, prepared: Prepared) -> float | None:
    """FlashInfer's decode over the same pages; None where it is not installed or does not apply."""
    case = prepared.case
    if importlib.util.find_spec("flashinfer") is None or case.queries > 1 or bench.smoke:
        return None
    if case.window or case.cache_dtype == FP8:
        return None
    import flashinfer

    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=bench.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=case.heads > case.kv_heads
    )
    blocks = prepared.tables.shape[1]
    indptr = torch.arange(case.rows + 1, device=bench.device, dtype=torch.int32) * blocks
    last = torch.full_like(prepared.lengths, (case.keys - 1) % BLOCK_SIZE + 1)
    wrapper.plan(
        indptr, prepared.tables.flatten(), last, case.heads, case.kv_heads, case.size, BLOCK_SIZE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    layer = prepared.cache.layers[0]
    return bench.seconds([lambda: wrapper.run(prepared.q, (layer.keys, layer.values))])


def _row(case: Case, seconds: float) -> dict[str, str | float | int]:
    names = ("rows", "queries", "keys", "heads", "kv_heads", "size")
    sizes = {name: getattr(case, name) for name in names}
    return {"case": case.name, **sizes, "us": round(seconds * 1e6, 1)}


def decode_table(bench: Bench, ops: TritonOps, ceilings: Ceilings) -> Table:
    rows = []
    for case in DECODE:
        if case.cache_dtype == FP8 and bench.smoke:
            continue
        prepared = prepare(bench, ops, case)
        case = prepared.case
        seconds = prepared.seconds(bench, ops)
        rate = case.kv_bytes() / seconds / 1e9
        row = _row(case, seconds) | {"GB/s": round(rate), "of copy": rate / ceilings.copy_gb_s}
        for name, other in (
            ("SDPA us", sdpa_seconds(bench, case)),
            ("FlashInfer us", flashinfer_seconds(bench, prepared)),
        ):
            row[name] = "" if other is None else round(other * 1e6, 1)
        if case.rows * case.keys >= 65_536:
            row["aim"] = "met" if rate >= DECODE_AIM * ceilings.copy_gb_s else "missed"
        rows.append(row)
        del prepared
    note = "bytes of keys and values over time; aim: 0.8 of a copy from 64 k cached tokens up"
    return Table("Decode attention", note, rows)


def prefill_table(bench: Bench, ops: TritonOps, ceilings: Ceilings) -> Table:
    rows = []
    for case in PREFILL:
        if case.cache_dtype == FP8 and bench.smoke:
            continue
        prepared = prepare(bench, ops, case)
        case = prepared.case
        seconds = prepared.seconds(bench, ops)
        rate = case.flops() / seconds / 1e12
        other = sdpa_seconds(bench, case)
        row = _row(case, seconds) | {
            "TFLOP/s": round(rate), "of matmul": rate / ceilings.matmul_tflop_s,
            "SDPA us": "" if other is None else round(other * 1e6, 1),
        }  # fmt: skip
        if case.name == "one prompt" and case.keys == 8192:
            row["aim"] = "met" if rate >= PREFILL_AIM else "missed"
        rows.append(row)
        del prepared
    note = "4 H D flops for every visible pair; aim: 350 TFLOP/s for one prompt of 8 k at D 128"
    return Table("Prefill attention", note, rows)
