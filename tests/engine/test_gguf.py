"""GGUF files answer as the same model in a folder does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from chairlift_client.models import find_gguf
from tests.engine.harness import GREEDY, Harness
from tests.engine.tiny_models import COMMON, randomize

HEADS, KV_HEADS, HIDDEN, LAYERS = 6, 2, 48, 2


def texts(count: int) -> list[str]:
    """Passages of English with code, digits, and what tokenizers tend to stumble over."""
    odd = [
        "",
        " ",
        "\n\n\n",
        "  two  blanks ",
        "naïve café",
        "日本語テキスト",
        "🏳️‍🌈 x",
        "1234567.89",
    ]
    whole = "\n".join(topics[name] for name in sorted(topics))
    return odd + [whole[397 * i : 397 * i + 10 + 7 * i] for i in range(count - len(odd))]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, as in most GGUF files."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(sorted(topics.values()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp turns neighbouring rows, transformers rows half a head apart."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)


def file_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By llama.cpp's names; matrices in float16, norms in float32."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(LAYERS):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{part}" for ours, part in parts.items()}
    made = {}
    for name, weight in weights.items():
        target = names[name.removesuffix(".weight")]
        if target.endswith(("attn_q", "attn_k")):
            weight = interleaved(weight, HEADS if target.endswith("q") else KV_HEADS)
        made[f"{target}.weight"] = weight.float() if weight.dim() == 1 else weight.half()
    return made


def write(file: Path, weights: dict[str, torch.Tensor], config: Any, backend: Any) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    written = json.loads(backend.to_str())["model"]
    words = sorted(written["vocab"], key=written["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(words) - 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in written["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    for name, tensor in file_tensors(weights).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """A Llama with grouped heads, from a folder and from a float16 GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    fast = tokenizer()
    options = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    options |= {"vocab_size": len(fast), "eos_token_id": 0, "bos_token_id": 0}
    config = AutoConfig.for_model("llama", **{**COMMON, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    with torch.no_grad():  # what float16 can hold, so that both are the same model
        for parameter in model.parameters():
            parameter.copy_(parameter.half() if parameter.dim() > 1 else parameter)
    model.save_pretrained(folder / "folder")
    fast.save_pretrained(folder / "folder")
    write(folder / "tiny.gguf", model.state_dict(), config, fast.backend_tokenizer)
    one, other = (
        loader.load(EngineConfig(model=str(folder / name), dtype="float32"))
        for name in ("folder", "tiny.gguf")
    )
    return one, other


def encode(loaded: LoadedModel, text: str) -> list[int]:
    ids: list[int] = loaded.tokenizer.backend_tokenizer.encode(text).ids
    return ids


def same_answers(one: LoadedModel, other: LoadedModel, prompts: list[str], count: int) -> None:
    params = replace(GREEDY, max_tokens=count)
    ids = [encode(one, prompt) for prompt in prompts]
    answers = [Harness(m, num_kv_blocks=200).generate(ids, params) for m in (one, other)]
    assert answers[0] == answers[1]


def test_grouped_heads_in_float16_A8(pair: tuple[LoadedModel, LoadedModel]) -> None:
    folder, file = pair
    assert file.eos_ids == folder.eos_ids == {0}
    assert file.vocab_size == folder.vocab_size
    assert file.max_model_len == folder.max_model_len
    same_answers(folder, file, texts(18)[8:], 24)


def test_token_ids_of_a_hundred_texts_A8(pair: tuple[LoadedModel, LoadedModel]) -> None:
    folder, file = pair
    for text in texts(100):
        assert encode(folder, text) == encode(file, text), text


@pytest.mark.slow
def test_smollm2_file_as_it_is_shipped_A8(smollm2_dir: Path) -> None:
    """4-bit weights, read as they are, against the folder that was made of them before."""
    path = find_gguf()
    assert path is not None
    file = loader.load(EngineConfig(model=str(path), dtype="bfloat16"))
    folder = loader.load(EngineConfig(model=str(smollm2_dir)))
    assert file.chat_template == folder.chat_template
    assert file.eos_ids == folder.eos_ids
    for text in texts(100):
        assert encode(folder, text) == encode(file, text), text
    same_answers(folder, file, texts(18)[8:], 8)
