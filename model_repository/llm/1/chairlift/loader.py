"""From a hub id, a folder, or a GGUF file to a checked model, its tokenizer, and its limits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from . import attention
from .attention import AttentionOptions, LayerShape, ShapeProbe, StepBatch
from .backends import Kernels, make_backend, open_kernels
from .config import EngineConfig
from .fusion import fuse

logger = logging.getLogger(__name__)

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(ValueError):
    """The model can't be served, and why."""


class LoadedModel(NamedTuple):
    """A model in evaluation mode that calls our attention, and what the engine must know of it.

    ``layers`` and ``options`` are indexed by attention layer; ``vocab_size`` is the width of the
    logits, ``eos_ids`` every end token of the generation config.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    layers: list[LayerShape]
    options: list[AttentionOptions]
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None


class Source(NamedTuple):
    """Where ``from_pretrained`` finds things: a name, and the GGUF file inside it, if it is one."""

    name: str
    gguf_file: str | None


def resolve_source(name: str) -> Source:
    """A ``.gguf`` path is loaded from its folder; everything else goes to transformers as it is."""
    if name.endswith(".gguf"):
        path = Path(name)
        if not path.is_file():
            raise UnsupportedModel(f"model: no such GGUF file: {name}")
        return Source(str(path.parent), path.name)
    return Source(name, None)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(f"device is '{name}', but torch finds no GPU")
    return device


def load(config: EngineConfig) -> LoadedModel:
    """Load and check; raises ``UnsupportedModel`` with the reason where it can't be served."""
    attention.register()
    device = pick_device(config.device)
    source = resolve_source(config.model)
    common: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    if source.gguf_file:
        common["gguf_file"] = source.gguf_file
    hf_config = AutoConfig.from_pretrained(source.name, **common)
    check_architecture(hf_config)
    model = AutoModelForCausalLM.from_pretrained(
        source.name,
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        attn_implementation=attention.INTERFACE_NAME,
        **common,
    )
    model = model.to(device).eval().requires_grad_(False)
    tokenizer = _load_tokenizer(config, source, common)
    probe = _probe(model, device)
    layers = [probe.shapes[layer] for layer in sorted(probe.shapes)]
    options = [probe.options[layer] for layer in sorted(probe.options)]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    kernels = open_kernels(config, device, model.dtype)
    if kernels is not None and config.fused_modules:
        with torch.inference_mode():
            report = fuse(model, kernels.ops, lambda: make_backend(kernels), layers, options)
        logger.info("%s", report.summary())
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        chat_template=_chat_template(config, tokenizer),
        layers=layers,
        options=options,
        eos_ids=end_tokens(model.generation_config, model.config, tokenizer),
        vocab_size=vocab_size,
        max_model_len=context_length(model.config, config.max_model_len),
        dtype=model.dtype,
        device=device,
        kernels=kernels,
    )


def check_architecture(hf_config: Any) -> None:
    """Refuse, before any weight is read, what our attention can't serve."""
    name = type(hf_config).__name__
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only models are served")
    try:
        cls = AutoModelForCausalLM._model_mapping[type(hf_config)]
    except KeyError:
        if getattr(hf_config, "auto_map", None):
            return
        raise UnsupportedModel(f"{name} has no causal language model in transformers") from None
    cls = cls[0] if isinstance(cls, tuple) else cls
    if not getattr(cls, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{cls.__name__} does not go through transformers' attention interface "
            "(_supports_attention_backend is not set), so its cache can't be paged"
        )
    text_config = hf_config.get_text_config(decoder=True)
    others = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if others:
        raise UnsupportedModel(
            f"{cls.__name__} has layers of type {sorted(others)}; served are {sorted(SUPPORTED_LAYER_TYPES)}"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(
            f"{cls.__name__} shares the KV cache between layers, which is not served"
        )


def end_tokens(generation_config: Any, hf_config: Any, tokenizer: Any) -> frozenset[int]:
    """All end-of-sequence ids: the generation config's list, else the model's, else the tokenizer's."""
    for holder in (generation_config, hf_config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def context_length(hf_config: Any, wanted: int | None) -> int:
    """The model's own context length, or a smaller one if set."""
    text_config = hf_config.get_text_config(decoder=True)
    own = getattr(text_config, "max_position_embeddings", None)
    if own is None:
        own = getattr(text_config, "n_positions", None)
    if own is None:
        if wanted is None:
            raise UnsupportedModel("the checkpoint names no context length; set max_model_len")
        return wanted
    if wanted is not None and wanted > own:
        raise UnsupportedModel(
            f"max_model_len is {wanted}, but the model's context is {own} tokens"
        )
    return wanted or int(own)


def _load_tokenizer(
    config: EngineConfig, source: Source, common: dict[str, Any]
) -> PreTrainedTokenizerBase:
    if config.tokenizer is not None:
        options = {key: value for key, value in common.items() if key != "gguf_file"}
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, **options)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **common)
    return tokenizer  # type: ignore[no-any-return]


def _chat_template(config: EngineConfig, tokenizer: Any) -> str | None:
    """The setting (a file or the template itself), else the checkpoint's."""
    if config.chat_template is None:
        template = tokenizer.chat_template
        return (
            template if isinstance(template, str) or template is None else template.get("default")
        )
    path = Path(config.chat_template)
    if "{" not in config.chat_template and path.is_file():
        return path.read_text()
    if "{" not in config.chat_template:
        raise ValueError(f"setting 'chat_template': no such file: {config.chat_template}")
    return config.chat_template


@torch.inference_mode()
def _probe(model: Any, device: torch.device) -> ShapeProbe:
    """Run two tokens through the model: which layers call our attention, with what, is then known."""
    probe = ShapeProbe()
    pair = torch.arange(2, device=device)
    batch = StepBatch(
        input_ids=pair,
        positions=pair,
        slot_mapping=pair,
        block_tables=pair[None].int(),
        query_start=torch.tensor([0, 2], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([2], dtype=torch.int32, device=device),
        logit_rows=pair[-1:],
        num_decodes=0,
        max_query_len=2,
        max_seq_len=2,
        backend=probe,
    )
    model(
        input_ids=pair[None],
        position_ids=pair[None],
        use_cache=False,
        logits_to_keep=batch.logit_rows,
        batch=batch,
    )
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    _check_layers(probe.shapes, expected, type(model).__name__)
    return probe


def _check_layers(layers: Iterable[int], expected: int, name: str) -> None:
    missing = sorted(set(range(expected)) - set(layers))
    if missing:
        raise UnsupportedModel(
            f"{name}: layers {missing} do not call the attention interface, so they can't be paged"
        )
