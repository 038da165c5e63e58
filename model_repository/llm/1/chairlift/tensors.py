"""Input tensors of one request -> one dict of plain values per row; ranks and types checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.calls import WireSettings
from chairlift.errors import RequestError
from chairlift.values import shorten

Array = npt.NDArray[Any]
Row = dict[str, Any]

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "STRING": np.dtype(np.object_),
    "BOOL": np.dtype(np.bool_),
    "INT32": np.dtype(np.int32),
    "UINT32": np.dtype(np.uint32),
    "INT64": np.dtype(np.int64),
    "UINT64": np.dtype(np.uint64),
    "FP32": np.dtype(np.float32),
}


class InputSpec(NamedTuple):
    """Triton's type name, and whether the tensor is a list ([-1]) or one value ([1])."""

    datatype: str
    many: bool = False


def _inputs() -> dict[str, InputSpec]:
    single = {
        "STRING": "text_input vllm_text_input messages sampling_parameters embedding_request "
        "guided_decoding_guide_type guided_decoding_guide",
        "BOOL": "stream stop exclude_input_in_output return_finish_reason "
        "return_cumulative_logprob return_logprobs return_num_input_tokens "
        "return_num_output_tokens return_log_probs return_perf_metrics return_context_logits "
        "return_generation_logits",
        "INT32": "max_tokens request_output_len min_tokens min_length top_k beam_width "
        "num_return_sequences end_id pad_id input_lengths",
        "FP32": "temperature top_p repetition_penalty presence_penalty frequency_penalty "
        "length_penalty",
        "UINT64": "seed random_seed lora_task_id",
    }
    lists = {"STRING": "stop_words bad_words image", "INT32": "input_ids"}
    return {name: InputSpec(kind) for kind, names in single.items() for name in names.split()} | {
        name: InputSpec(kind, many=True) for kind, names in lists.items() for name in names.split()
    }


# Every input that config.pbtxt declares. `vllm_text_input` is `text_input` by another name: the
# vllm_model ensemble maps its prompt to it, which tells this model whose defaults to use.
INPUTS: dict[str, InputSpec] = _inputs()


def split_rows(inputs: Mapping[str, Array], wire: WireSettings) -> list[Row]:
    """Tensors [B, ...] (or [...] where the entry has no batch dimension) -> B dicts of values."""
    columns = {name: _column(name, tensor, wire.batched) for name, tensor in inputs.items()}
    counts = {len(column): name for name, column in columns.items() if column}
    if len(counts) > 1:
        parts = ", ".join(f"{name} has {count}" for count, name in sorted(counts.items()))
        raise RequestError(f"inputs must have equal numbers of rows, but {parts}")
    count = next(iter(counts), 1)
    if count > wire.limits.rows:
        raise RequestError(f"a request may hold {wire.limits.rows} rows at most, got {count}")
    return [
        {name: column[row] if column else [] for name, column in columns.items()}
        for row in range(count)
    ]


def _column(name: str, tensor: Array, batched: bool) -> list[object]:
    """One value per row; nothing at all for an empty list, whose shape Triton does not keep."""
    spec = INPUTS.get(name)
    if spec is None:
        raise RequestError(f"unknown input {shorten(name)}")
    if tensor.dtype != NUMPY_TYPES[spec.datatype]:
        raise RequestError(f"{name} must be of type {spec.datatype}, got {tensor.dtype}")
    if spec.many and tensor.size == 0:
        return []
    if not spec.many and (tensor.ndim == 0 or tensor.shape[-1] != 1):
        positive = " > 0" if name in ("max_tokens", "request_output_len") else ""
        raise RequestError(
            f"{name} must be a single value{positive}, got shape {list(tensor.shape)}"
        )
    if tensor.ndim != 1 + batched:
        want = ("[batch, " if batched else "[") + ("n]" if spec.many else "1]")
        raise RequestError(f"{name} must have shape {want}, got {list(tensor.shape)}")
    rows = tensor if batched else tensor[np.newaxis]
    values: list[object] = rows.tolist() if spec.many else rows[:, 0].tolist()
    return values
