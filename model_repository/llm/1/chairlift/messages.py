"""Reads `messages`: the JSON text of a chat."""

from __future__ import annotations

from typing import Any

from chairlift.calls import Limits, Message
from chairlift.errors import ErrorCode, RequestError
from chairlift.values import as_text, load_json, refuse, shorten

# A free choice of role could spell a control token in templates that write '<|' + role + '|>'.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_messages(value: object, limits: Limits) -> tuple[Message, ...]:
    """JSON list of {role, content} -> messages; raises `RequestError` naming the place."""
    turns = load_json("messages", as_text("messages", value, limits.prompt_bytes))
    if not isinstance(turns, list) or not turns:
        refuse("messages", "a list of messages, at least one", turns)
    if len(turns) > limits.messages:
        refuse("messages", f"a list of at most {limits.messages} messages", turns)
    return tuple(_message(f"messages[{i}]", turn, limits) for i, turn in enumerate(turns))


def _message(name: str, turn: Any, limits: Limits) -> Message:
    if not isinstance(turn, dict):
        refuse(name, "an object with role and content", turn)
    for key, value in turn.items():
        if key not in ("role", "content", "name") and value:
            text = f"{name}: {shorten(key)} is not supported"
            raise RequestError(text, ErrorCode.UNSUPPORTED)
    role = turn.get("role")
    if role not in ROLES:
        refuse(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    return Message(role, _content(f"{name}.content", turn.get("content"), limits))


def _content(name: str, content: object, limits: Limits) -> str:
    """Plain text, or OpenAI's list of parts as long as all of them are text."""
    if not isinstance(content, list):
        return as_text(name, content, limits.prompt_bytes)
    texts = []
    for i, part in enumerate(content):
        place = f"{name}[{i}]"
        if not isinstance(part, dict):
            refuse(place, "an object with type and text", part)
        if part.get("type") != "text":
            text = f"{place}: parts of type {shorten(part.get('type'))} are not supported"
            raise RequestError(text, ErrorCode.UNSUPPORTED)
        texts.append(as_text(f"{place}.text", part.get("text"), limits.prompt_bytes))
    return "".join(texts)
