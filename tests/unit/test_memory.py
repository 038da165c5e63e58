"""The memory sum: figures by hand, the same from a config, and refusals with their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.attention import LayerShape
from chairlift.memory import GIB, cpu_pool_bytes, gpu_pool_bytes, kv_bytes_per_token, size_pool
from chairlift.plan import main, parse_memory

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def test_bytes_per_token_of_known_models() -> None:
    """Llama-3.1-8B takes 128 KiB a token in bf16, Qwen3-0.6B 112 KiB."""
    assert kv_bytes_per_token([LayerShape(8, 128, 128)] * 32, 2) == 128 * 1024
    assert kv_bytes_per_token([LayerShape(8, 128, 128)] * 28, 2) == 112 * 1024


def test_plan_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["--model", str(tmp_path), "--gpu", "h200", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_per_token"] == 128 * 1024
    assert plan["weight_bytes"] == 8_030_261_248 * 2
    free = int(139.7 * GIB * 0.9) - plan["weight_bytes"] - plan["largest_step_bytes_estimated"]
    assert 0 <= free - plan["kv_pool_bytes"] < 16 * 128 * 1024
    assert plan["requests_that_fit"]["2048"] == plan["kv_blocks"] // 128


def test_a_model_too_big_says_both_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["--model", str(tmp_path), "--gpu", "t4"]) == 2
    assert "needs at least 4,194,304 bytes" in capsys.readouterr().err


def test_F6_others_on_the_device_count() -> None:
    total, weights = 80 * GIB, 16 * GIB
    alone = gpu_pool_bytes(total, total - weights, weights, GIB, 0.9)
    shared = gpu_pool_bytes(total, int(total * 0.7) - weights, weights, GIB, 0.9)
    assert alone == 72 * GIB - weights - GIB
    assert alone - shared == pytest.approx(0.3 * total, abs=2)


def test_F6_wanted_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"num_kv_blocks is 1000 .* 1,000,000 bytes are available"):
        size_pool(1_000_000, 1000, 16, 1000)
    with pytest.raises(ValueError, match="only 10 bytes of memory"):
        cpu_pool_bytes(10, 11)


def test_the_advertised_tokens_are_usable_K9() -> None:
    pool = size_pool(16_000_000, 1000, 16, None)
    assert pool.num_tokens == pool.num_usable_blocks * 16
    assert pool.requests_of(pool.num_tokens) == 1
    assert pool.requests_of(pool.num_tokens + 1) == 0


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * GIB), ("1.5gib", 3 * GIB // 2), ("2GB", 2 * 10**9), ("7", 7)]
)
def test_memory_sizes(text: str, count: int) -> None:
    assert parse_memory(text) == count
