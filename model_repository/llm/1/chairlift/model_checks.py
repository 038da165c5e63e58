"""What can be served, and the reason where a model can't: most of it before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM

from .attention import AttentionOptions

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(ValueError):
    """The model can't be served, and why."""


def check_architecture(hf_config: Any) -> None:
    """Refuse, by the configuration alone, what our attention can't serve."""
    name = type(hf_config).__name__
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only models are served")
    try:
        cls: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
    except KeyError:
        if "AutoModelForCausalLM" not in (getattr(hf_config, "auto_map", None) or ()):
            raise UnsupportedModel(f"{name} has no causal language model in transformers") from None
    else:
        check_class(cls[0] if isinstance(cls, tuple) else cls)
    _check_layers(hf_config.get_text_config(decoder=True), name)


def check_class(cls: type) -> None:
    if not getattr(cls, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{cls.__name__} does not go through transformers' attention interface "
            "(_supports_attention_backend is not set), so its cache can't be paged"
        )


def _check_layers(text_config: Any, name: str) -> None:
    others = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if others:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(sorted(others))}; served are "
            f"{', '.join(sorted(SUPPORTED_LAYER_TYPES))}"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares the KV cache between layers, which is not served")


def check_attention(model: Any, options: Sequence[AttentionOptions], max_model_len: int) -> None:
    """Refuse models that attend otherwise than they tell the attention interface."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(f"{name}: {path} attends to later tokens too")
    text_config = model.config.get_text_config(decoder=True)
    window = getattr(text_config, "sliding_window", None)
    types = getattr(text_config, "layer_types", None) or ["sliding_attention"] * len(options)
    if not isinstance(window, int) or not getattr(text_config, "use_sliding_window", True):
        return
    for layer, (kind, option) in enumerate(zip(types, options, strict=False)):
        slides = kind == "sliding_attention" and window < max_model_len
        if slides and option.window is None:
            raise UnsupportedModel(
                f"{name} does not pass its sliding window ({window}) on to the attention of layer "
                f"{layer}; set max_model_len to {window} or less"
            )


def context_length(hf_config: Any, wanted: int | None) -> int:
    """The model's own context length, or a smaller one if set.

    YaRN's ``max_position_embeddings`` may be the length before scaling (Qwen) or after it.
    """
    text_config = hf_config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    own = next((n for n in (getattr(text_config, name, None) for name in names) if n), None)
    if own is None:
        if wanted is None:
            raise UnsupportedModel("the checkpoint names no context length; set max_model_len")
        return wanted
    own = max(int(own), _yarn_length(text_config))
    if wanted is not None and wanted > own:
        raise UnsupportedModel(
            f"max_model_len is {wanted}, but the model's context is {own} tokens"
        )
    return wanted or own


def _yarn_length(text_config: Any) -> int:
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text_config, name, None)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "yarn":
            before = rope.get("original_max_position_embeddings") or 0
            return int(before * rope.get("factor", 1))
    return 0


def end_tokens(
    generation_config: Any, hf_config: Any, tokenizer: Any, vocab_size: int
) -> frozenset[int]:
    """Every end token: the generation config's list, else the model's, and the tokenizer's.

    Ids beyond the model's vocabulary can't be generated and are left out.
    """
    found: set[int] = set()
    for holder in (generation_config, hf_config, hf_config.get_text_config(decoder=True)):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)
