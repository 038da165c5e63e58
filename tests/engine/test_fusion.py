"""Fused modules: what they must not be taken for, and that they change nothing but speed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from chairlift import loader
from chairlift.backends import make_backend
from chairlift.config import EngineConfig
from chairlift.direct_forward import DirectForward
from chairlift.fused_modules import FusedNorm
from chairlift.loader import LoadedModel
from chairlift.self_check import Subject, paged_logits
from tests.engine.harness import Harness, Oracle
from tests.engine.tiny_models import FAMILIES, build


def load(folder: Path, **settings: Any) -> LoadedModel:
    return loader.load(EngineConfig(model=str(folder), attention_backend="cpu", **settings))


def logits(loaded: LoadedModel) -> Tensor:
    """Of a prefill, a chunk, and a decode [tokens, V]."""
    subject = Subject(loaded.model, loaded.layers, loaded.vocab_size, loaded.dtype, loaded.device)
    backend = make_backend(loaded.kernels)
    with torch.inference_mode():
        return torch.cat(paged_logits(subject, backend, loaded.forward)).float()


def test_clamped_values_are_not_fused(tmp_path: Path) -> None:
    """OLMo clamps queries, keys and values; only big activations show it."""
    loaded = load(build(tmp_path, "olmo", clip_qkv=20.0))
    assert loaded.fusion is not None
    assert "attention" not in loaded.fusion.kinds
    assert "differs" in loaded.fusion.left_alone["layers.0.self_attn"]


def test_scaling_of_far_queries_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models attend more sharply beyond the length they were trained at first."""
    folder = build(tmp_path, "llama")

    class LlamaSharperAttention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: Any, position_ids: Tensor, **kwargs: Any):
            sharper = 1 + 0.1 * (position_ids >= 256).to(hidden_states)
            return super().forward(hidden_states * sharper[..., None], *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "LlamaAttention", LlamaSharperAttention)
    loaded = load(folder)
    assert loaded.fusion is not None
    assert loaded.fusion.kinds == {"MLP", "norm"}
    assert "LlamaSharperAttention differs" in loaded.fusion.left_alone["layers.1.self_attn"]


def test_layers_without_positions_are_fused_too(tmp_path: Path) -> None:
    folder = build(tmp_path, "smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    loaded = load(folder)
    assert loaded.fusion is not None
    assert list(loaded.fusion.replaced.values()).count("decoder layer") == 4
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder).eval())
    prompt = list(range(3, 43))
    oracle.check(prompt, Harness(loaded, num_kv_blocks=20).generate([prompt])[0], 32)


def test_same_children_other_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path, "llama")

    class LlamaReorderedMLP(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    monkeypatch.setattr(modeling_llama, "LlamaMLP", LlamaReorderedMLP)
    loaded = load(folder)
    assert loaded.fusion is not None
    assert loaded.fusion.kinds == {"attention", "norm"}
    assert "LlamaReorderedMLP differs" in loaded.fusion.left_alone["layers.1.mlp"]


def test_fused_model_that_answers_otherwise_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(tmp_path, "llama")
    honest = loader.fuse

    def spoil(model: Any, *args: Any) -> Any:
        report = honest(model, *args)
        model.lm_head.weight.data *= torch.linspace(-1, 1, len(model.lm_head.weight))[:, None]
        return report

    monkeypatch.setattr(loader, "fuse", spoil)
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert loaded.fusion is None
    assert "without fused modules" in caplog.text
    prompt = list(range(5, 25))
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder).eval())
    oracle.check(prompt, Harness(loaded, num_kv_blocks=20).generate([prompt])[0], 32)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "gpt_neox", "glm"])
def test_packed_bf16_agrees_with_torch(tmp_path: Path, name: str) -> None:
    """All linear layers are packed, and the logits as close to float32 as plain torch's."""
    folder = build(tmp_path, name, **FAMILIES[name])
    fused = load(folder, dtype="bfloat16")
    assert not [path for path, module in fused.model.named_modules() if type(module) is nn.Linear]
    check_bf16(folder, fused)


def test_gemma_norm_with_large_weights(tmp_path: Path) -> None:
    """Gemma 3's norms multiply by 1 + 60: in bf16 that is close to 60, yet not the same."""
    folder = build(tmp_path, "gemma3_text", **FAMILIES["gemma3_text"])
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "norm" in name and "q_norm" not in name and "k_norm" not in name:
            weights[name] += 60
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fused = load(folder, dtype="bfloat16")
    assert fused.fusion is not None
    assert fused.fusion.kinds == {"attention", "MLP", "norm", "logits"}
    norms = [module for module in fused.model.modules() if isinstance(module, FusedNorm)]
    assert all(norm.unit_offset for norm in norms)
    check_bf16(folder, fused)


def test_smollm2_bf16_logits(smollm2_dir: Path) -> None:
    fused = load(smollm2_dir, dtype="bfloat16")
    assert fused.fusion is not None
    assert list(fused.fusion.replaced.values()).count("decoder layer") == 30
    check_bf16(smollm2_dir, fused)


def test_smollm2_is_stepped_past_its_own_forward(smollm2_dir: Path) -> None:
    assert isinstance(load(smollm2_dir, dtype="bfloat16").forward, DirectForward)


@pytest.mark.parametrize("change", ["embeddings", "far positions", "logits"])
def test_a_model_that_does_more_is_called_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Than embedding, layers, norm, and head: wherever it does so, and if only far away."""
    folder = build(tmp_path, "llama")
    model, causal = modeling_llama.LlamaModel, modeling_llama.LlamaForCausalLM
    inner, outer = model.forward, causal.forward

    def louder(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["inputs_embeds"] = self.embed_tokens(input_ids) * 1.01
        return inner(self, **kwargs)

    def farther(self: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None:
            position_ids = position_ids + (position_ids >= 100)
        return inner(self, position_ids=position_ids, **kwargs)

    def sharper(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = outer(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    if change == "logits":
        monkeypatch.setattr(causal, "forward", sharper)
    else:
        monkeypatch.setattr(model, "forward", louder if change == "embeddings" else farther)
    loaded = load(folder, dtype="bfloat16")
    assert loaded.fusion is not None and "stack of layers" in loaded.fusion.kinds
    assert not isinstance(loaded.forward, DirectForward)
    check_bf16(folder, loaded)


def check_bf16(folder: Path, fused: LoadedModel) -> None:
    exact = logits(load(folder, dtype="float32"))
    plain = loader.load(
        EngineConfig(model=str(folder), dtype="bfloat16", attention_backend="torch")
    )
    error, usual = (float((logits(one) - exact).pow(2).mean().sqrt()) for one in (fused, plain))
    assert error < 1.2 * usual
