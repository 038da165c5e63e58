"""Readers of single values: what JSON, request parameters and tensors mean by a number or a text.

Each takes the field's name and a value of any type and returns it clean, or raises one
`RequestError` that names the field, the limit and the value. Numbers may come as text, whole floats
count as integers, and booleans never count as numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from chairlift.errors import RequestError

_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})(e[+-]?\d{1,3})?", re.I | re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,40}", re.ASCII)
FLOAT32_MAX = 3.4e38
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def shorten(value: object) -> str:
    """A value as an error message shows it: never long, whatever a client sent."""
    match value:
        case bool():
            return str(value).lower()
        case int() if value.bit_length() > 128:
            return f"an integer of {value.bit_length()} bits"
        case str() | bytes() if len(value) > 60:
            return f"{value[:60]!r}... ({len(value)} long)"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} keys"
        case _:
            return repr(value)[:100]


def refuse(name: str, want: str, value: object) -> NoReturn:
    raise RequestError(f"{name} must be {want}, got {shorten(value)}")


def as_int(name: str, value: object, low: int, high: int, want: str = "") -> int:
    """An integer in [low, high]; 8, 8.0 and "8" are equal."""
    number = _integer(value)
    if number is None or not low <= number <= high:
        refuse(name, want or f"an integer from {low} to {high}", value)
    return number


def as_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with ``above``."""
    number = _number(value)
    if number is None or not low <= number <= high or (above and number == low):
        limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        refuse(name, f"a number {limits}", value)
    return number


def as_flag(name: str, value: object) -> bool:
    """A boolean; LiteLLM sends 0 and 1, others send text."""
    if isinstance(value, bool):
        return value
    known = _FLAGS.get(str(value).lower()) if isinstance(value, (int, str)) else None
    if known is None:
        refuse(name, "true or false", value)
    return known


def as_text(name: str, value: object, max_bytes: int) -> str:
    """Text that UTF-8 can carry, of a bounded size; a STRING tensor's elements are bytes."""
    if isinstance(value, bytes):
        _check_size(name, len(value), max_bytes)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not UTF-8: {error.reason} at {error.start}") from None
    if not isinstance(value, str):
        refuse(name, "text", value)
    _check_size(name, len(value), max_bytes)
    try:
        _check_size(name, len(value.encode()), max_bytes)
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds a lone surrogate at {error.start}") from None
    return value


def as_texts(name: str, value: object, count: int, max_bytes: int) -> tuple[str, ...]:
    """A list of texts; one text is a list of one. Empty ones are dropped: LiteLLM sends [""]."""
    items = [value] if isinstance(value, (str, bytes)) else _list(name, value, "texts", count)
    texts = (as_text(f"{name}[{i}]", item, max_bytes) for i, item in enumerate(items))
    return tuple(text for text in texts if text)


def as_ids(name: str, value: object, count: int) -> tuple[int, ...]:
    """A list of token ids; one id is a list of one. The vocabulary is checked by the tokenizer."""
    value = _from_json_text(name, value)
    items = _list(name, value, "token ids", count) if isinstance(value, list) else [value]
    return tuple(as_int(f"{name}[{i}]", item, 0, 2**31 - 1) for i, item in enumerate(items))


def as_bias(name: str, value: object, count: int) -> tuple[tuple[int, float], ...]:
    """A map of token id -> number to add to its logit, clamped to +-100 as OpenAI and vLLM do."""
    value = _from_json_text(name, value)
    if not isinstance(value, dict):
        refuse(name, "a map of token ids to numbers", value)
    if len(value) > count:
        refuse(name, f"a map of at most {count} keys", value)
    pairs: dict[int, float] = {}
    for key, number in value.items():
        token_id = as_int(f"{name} key", key, 0, 2**31 - 1)
        bias = as_float(f"{name}[{token_id}]", number, -FLOAT32_MAX, FLOAT32_MAX)
        pairs[token_id] = max(-100.0, min(100.0, bias))
    return tuple(pairs.items())


def load_json(name: str, text: str) -> Any:
    """JSON without NaN and Infinity; raises `RequestError` naming the field."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:100] if isinstance(error, ValueError) else "nested too deeply"
        raise RequestError(f"{name} is not valid JSON: {reason}") from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _from_json_text(name: str, value: object) -> object:
    """Request parameters carry no lists or maps, so those may come as JSON text."""
    return load_json(name, value) if isinstance(value, str) and value[:1] in "[{" else value


def _list(name: str, value: object, what: str, count: int) -> Iterable[object]:
    if not isinstance(value, list):
        refuse(name, f"a list of {what}", value)
    if len(value) > count:
        refuse(name, f"a list of at most {count} {what}", value)
    return value


def _integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _number(value: object) -> float | None:
    """The finite float that a value means, if it means one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.strip()
        if not _NUMBER.fullmatch(value):
            return None
    elif not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _check_size(name: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise RequestError(f"{name} is {size} bytes long, more than the limit of {max_bytes}")
