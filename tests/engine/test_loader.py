"""Where models come from, what is read of them, and which are refused for which reason."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel, UnsupportedModel
from chairlift.model_checks import context_length
from tests.engine.harness import GREEDY, Harness
from tests.engine.tiny_models import VOCAB_SIZE, build, tiny_tokenizer

PROMPT = list(range(3, 30))


def load(model: Path | str, **settings: Any) -> LoadedModel:
    return loader.load(EngineConfig(model=str(model), **settings))


def answer(loaded: LoadedModel, **fields: Any) -> list[int]:
    return Harness(loaded, num_kv_blocks=40).generate([PROMPT], **fields)[0]


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def own_llama(tmp_path: Path) -> Path:
    """One to be spoilt by the test."""
    return build(tmp_path / "llama", "llama")


# ------------------------------------------------------------------ sources


def test_sharded_checkpoint(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert answer(load(tmp_path)) == answer(load(llama))


LOAD_BY_ID = """
import json, sys
from chairlift import loader
from chairlift.config import EngineConfig
loaded = loader.load(EngineConfig(model="someone/tiny-llama"))
print(json.dumps({"vocab_size": loaded.vocab_size, "layers": len(loaded.layers)}))
"""


def test_hub_id_from_the_cache_and_a_quiet_log(llama: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(llama, target_is_directory=True)
    environment = {"PYTHONPATH": ":".join(sys.path), "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_BY_ID],
        env=environment | {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"vocab_size": VOCAB_SIZE, "layers": 2}
    assert "it/s" not in done.stderr
    assert "\r" not in done.stderr


def test_weights_are_held_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once packed, transformers' own modules are gone."""
    originals = []
    read = loader._read_model

    def watch(*args: Any) -> Any:
        model = read(*args)
        layer = model.model.layers[0]
        for module in (layer, layer.mlp.gate_proj, layer.self_attn.q_proj, model.lm_head):
            originals.extend([weakref.ref(module), weakref.ref(next(module.parameters()))])
        return model

    monkeypatch.setattr(loader, "_read_model", watch)
    loaded = load(llama, dtype="bfloat16", attention_backend="cpu")
    gc.collect()
    assert [ref() for ref in originals] == [None] * 8
    assert loaded.vocab_size == VOCAB_SIZE


# ------------------------------------------------------------------ what is read


def test_dtype_of_the_checkpoint_unless_set(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(llama).dtype == torch.float32
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").dtype == torch.float32


def test_every_end_token_of_the_generation_config_stops_S7(own_llama: Path) -> None:
    free = answer(load(own_llama))
    second = free[5]
    edit(own_llama / "generation_config.json", eos_token_id=[VOCAB_SIZE - 1, second])
    loaded = load(own_llama)
    assert loaded.eos_ids == {VOCAB_SIZE - 1, second}
    harness = Harness(loaded, num_kv_blocks=40)
    tokens = harness.generate([PROMPT])[0]
    assert tokens == free[: free.index(second) + 1]
    assert harness.answers[0].finish == {0: "stop"}


def test_end_tokens_of_config_and_tokenizer(own_llama: Path) -> None:
    (own_llama / "generation_config.json").unlink()
    edit(own_llama / "config.json", eos_token_id=[7, VOCAB_SIZE + 3])
    edit(own_llama / "tokenizer_config.json", eos_token="t9")
    assert load(own_llama).eos_ids == {7, 9}


def test_chat_template_from_checkpoint_file_or_setting(own_llama: Path, tmp_path: Path) -> None:
    assert load(own_llama).chat_template is None
    (own_llama / "chat_template.jinja").write_text("{{ 'of the checkpoint' }}")
    assert load(own_llama).chat_template == "{{ 'of the checkpoint' }}"
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'of a file' }}")
    assert load(own_llama, chat_template=str(file)).chat_template == "{{ 'of a file' }}"
    assert load(own_llama, chat_template="{{ 1 }}").chat_template == "{{ 1 }}"
    with pytest.raises(ValueError, match="chat_template.*no such file.*absent.jinja"):
        load(own_llama, chat_template="absent.jinja")


def rope(**values: Any) -> SimpleNamespace:
    config = SimpleNamespace(max_position_embeddings=4096, **values)
    config.get_text_config = lambda decoder: config
    return config


def test_context_length() -> None:
    assert context_length(rope(), None) == 4096
    assert context_length(rope(), 100) == 100
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert context_length(rope(rope_parameters=yarn), None) == 16384
    assert context_length(rope(rope_scaling={**yarn, "factor": 0.5}), None) == 4096
    with pytest.raises(UnsupportedModel, match="max_model_len is 5000.*context is 4096"):
        context_length(rope(), 5000)
    nameless = rope()
    nameless.max_position_embeddings = None
    assert context_length(nameless, 77) == 77
    with pytest.raises(UnsupportedModel, match="set max_model_len"):
        context_length(nameless, None)


# ------------------------------------------------------------------ remote code

REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_suffix(".ran").touch()

class OursConfig(LlamaConfig):
    model_type = "ours"

class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig
"""


def test_remote_code_runs_only_if_set(
    own_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    code = REMOTE.replace('Path(__file__).with_suffix(".ran")', f"Path({str(marker)!r})")
    (own_llama / "modeling_ours.py").write_text(code)
    names = {
        "AutoConfig": "modeling_ours.OursConfig",
        "AutoModelForCausalLM": "modeling_ours.OursForCausalLM",
    }
    edit(own_llama / "config.json", model_type="ours", auto_map=names)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    with pytest.raises(UnsupportedModel, match="trust_remote_code"):
        load(own_llama)
    assert not marker.exists()
    loaded = load(own_llama, trust_remote_code=True)
    assert marker.exists()
    assert type(loaded.model).__name__ == "OursForCausalLM"
    assert len(answer(loaded)) == GREEDY.max_tokens


# ------------------------------------------------------------------ refusals

BEFORE_WEIGHTS: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "T5Config is an encoder-decoder"),
    ("mamba", {}, "MambaForCausalLM does not go through transformers' attention interface"),
    ("falcon", {}, "FalconForCausalLM does not go through"),
    ("vit", {}, "ViTConfig has no causal language model"),
    ("llama4_text", {"num_hidden_layers": 4}, "layers of type chunked_attention"),
    ("qwen3_next", {}, "Qwen3Next"),
    ("gemma3n_text", {}, "shares the KV cache between layers"),
]


@pytest.mark.parametrize(("model_type", "options", "reason"), BEFORE_WEIGHTS, ids=lambda p: str(p))
def test_refused_by_its_config_alone(
    tmp_path: Path, model_type: str, options: dict[str, Any], reason: str
) -> None:
    AutoConfig.for_model(model_type, **options).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


# Older versions of transformers have no attention interface in the first two.
BY_TRIAL = {
    "bert": "attends to later tokens too|does not go through",
    "nemotron": "can't be called with a step's tensors.*batch|does not go through",
    "doge": "attention mask of its own",
}


@pytest.mark.parametrize("model_type", BY_TRIAL)
def test_refused_by_a_trial(tmp_path: Path, model_type: str) -> None:
    folder = build(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=BY_TRIAL[model_type]):
        load(folder)


def test_window_that_the_attention_is_not_told(tmp_path: Path) -> None:
    """Some models put it in their mask only; it doesn't matter below the window's length."""
    folder = build(tmp_path, "llama", sliding_window=32)
    with pytest.raises(UnsupportedModel, match="sliding window .32. .*layer 0"):
        load(folder)
    loaded = load(folder, max_model_len=32)
    assert loaded.max_model_len == 32


def test_checkpoint_without_all_weights(own_llama: Path) -> None:
    """A base model, or a classifier, would answer from a random output layer."""
    weights = load_file(own_llama / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, own_llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="no weights that fit.*lm_head.weight"):
        load(own_llama)


def test_nothing_there(llama: Path, own_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such GGUF file: .*absent.gguf|transformers 5.6"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(UnsupportedModel, match="model '.*' can't be loaded: .*config.json"):
        load(tmp_path)
    with pytest.raises(UnsupportedModel, match="max_model_len is 513"):
        load(llama, max_model_len=513)
    with pytest.raises(UnsupportedModel, match="model '.*tokens' can't be loaded"):
        load(llama, tokenizer=str(tmp_path / "tokens"))
    (own_llama / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="model '.*' can't be loaded: .*model.safetensors"):
        load(own_llama)


def test_another_gpu_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedModel, match="'cuda:1': .* CUDA_VISIBLE_DEVICES=1"):
        loader.pick_device("cuda:1")
    assert loader.pick_device("cuda:0") == torch.device("cuda:0")


def test_device_that_is_not_there(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedModel, match="device is 'cuda', but torch finds no GPU"):
        load(llama, device="cuda")


# ------------------------------------------------------------------ overflow


def test_overflow_in_fp16_ends_that_request_only_A6(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One token's embedding is as large as fp16 allows; what the first MLP adds is too much."""
    folder = build(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[90] = embedding[90].sign() * 6e4
    weights["model.layers.0.mlp.down_proj.weight"] *= 4e3
    weights["lm_head.weight"][90] = 0  # the others' answers shall not hold it
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load(folder, dtype="float16")
    others = [PROMPT, PROMPT[5:20]]
    alone = Harness(loaded, num_kv_blocks=40).generate(others)
    harness = Harness(loaded, num_kv_blocks=40)
    with caplog.at_level(logging.WARNING):
        first, bad, second = (harness.submit(p) for p in (others[0], [5, 90, 7], others[1]))
        harness.run()
    assert harness.answers[bad].error is not None
    assert "NaN" in harness.answers[bad].error
    assert [harness.answers[uid].tokens[0] for uid in (first, second)] == alone
    assert all(len(tokens) == GREEDY.max_tokens for tokens in alone)
