"""Strategies for requests of every malformed kind: odd values, JSON, and tensors of odd shapes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from chairlift.parameters import CANONICAL
from chairlift.tensors import INPUTS, NUMPY_TYPES

NAMES = st.one_of(st.sampled_from([*CANONICAL, "text_input", "nonsense", ""]), st.text(max_size=8))
ODD_TEXTS = st.sampled_from(
    ["", "8", "8.0", "-1", "1e999", "nan", "true", "None", "[1, 2]", '{"1": 2}', "[", "{}", "\0"]
    + ["<s>", "</s>", "<|user|>", "漢字 🌶️", "9" * 50, "x" * 600, "\ud800", "\N{SNOWMAN}" * 300]
)
TEXTS = st.one_of(ODD_TEXTS, st.text(max_size=12))
INTEGERS = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400]),
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), TEXTS)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
JSON_TEXTS = st.one_of(
    st.dictionaries(NAMES, JSON_VALUES, max_size=4).map(json.dumps), JSON_VALUES.map(json.dumps)
)
MESSAGES = st.one_of(
    JSON_TEXTS,
    st.lists(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "system", "tool"]), TEXTS)},
            optional={"content": JSON_VALUES, "name": TEXTS},
        ),
        max_size=3,
    ).map(json.dumps),
)
ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "STRING": TEXTS.map(lambda text: text.encode(errors="replace")) | st.binary(max_size=6),
    "BOOL": st.booleans(),
    "INT32": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 30),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32) | st.floats(0, 2, width=32),
}
TEXT_INPUTS = {"messages": MESSAGES, "sampling_parameters": JSON_TEXTS}


@st.composite
def tensors(draw: st.DrawFn, name: str, batched: bool) -> Any:
    """Usually of the declared kind and rank, sometimes of neither."""
    spec = INPUTS.get(name)
    odd = draw(st.integers(0, 19))
    if spec is None or odd == 0:
        datatype = draw(st.sampled_from(sorted(ELEMENTS)))
    else:
        datatype = spec.datatype
    elements = ELEMENTS[datatype]
    if name in TEXT_INPUTS and datatype == "STRING":
        elements = TEXT_INPUTS[name].map(lambda text: text.encode(errors="replace"))
    length = draw(st.integers(0, 4)) if (spec and spec.many) or odd == 1 else 1
    shape = (1, length) if batched else (length,)
    if odd == 2:
        shape = draw(st.sampled_from([(), (1,), (2, 1), (1, 1, 1), (0, 1), (1, 2)]))
    values = draw(st.lists(elements, min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.empty(math.prod(shape), dtype=NUMPY_TYPES[datatype])
    array[:] = values
    return array.reshape(shape)
