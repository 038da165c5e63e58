"""Two tokens through a model: which layers call our attention, with what, is then known."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .attention import AttentionOptions, LayerShape, ShapeProbe, StepBatch
from .model_checks import UnsupportedModel


class Probed(NamedTuple):
    """Indexed by attention layer."""

    layers: list[LayerShape]
    options: list[AttentionOptions]


@torch.inference_mode()
def probe(model: Any, device: torch.device) -> Probed:
    """Raises ``UnsupportedModel`` unless every layer calls the interface, once, with our batch."""
    name = type(model).__name__
    seen = ShapeProbe()
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
        backend=seen,
    )
    try:
        output = model(
            input_ids=pair[None],
            position_ids=pair[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            batch=batch,
        )
    except Exception as error:
        raise UnsupportedModel(
            f"{name} can't be called with a step's tensors: {type(error).__name__}: {error}"
        ) from error
    if output.logits.shape[:2] != (1, 1):
        raise UnsupportedModel(f"{name} does not give logits for chosen tokens only")
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    missing = sorted(set(range(expected)) - set(seen.shapes))
    if missing:
        raise UnsupportedModel(
            f"{name}: layers {missing} do not call the attention interface, so they can't be paged"
        )
    order = sorted(seen.shapes)
    return Probed([seen.shapes[i] for i in order], [seen.options[i] for i in order])
