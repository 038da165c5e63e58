"""One log line per request, when it has ended; the text of a prompt only where it was asked for."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timezone
from typing import Any

from .calls import Prompt, TextPrompt, TokenPrompt
from .observations import Ended

logger = logging.getLogger(__name__)

FIELDS = "fields"


class RequestLog:
    """Writes what an operator asks about a request: who, how long, how much, and how it ended."""

    def __init__(self, *, enabled: bool, prompts: bool) -> None:
        self._enabled = enabled
        self._prompts = prompts

    def ended(self, request: Ended) -> None:
        if not self._enabled:
            return
        fields = _fields(request)
        if self._prompts:
            fields["prompt"] = _as_sent(request.prompt)
        line = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
        logger.info("request ended: %s", line, extra={FIELDS: fields})


def _fields(request: Ended) -> dict[str, Any]:
    """Times in seconds; those of what did not happen are left out."""
    record = request.record
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "number": record.group,
        "finish": ",".join(record.finish_reasons) or "error",
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
    }
    if record.tenant:
        fields["tenant"] = record.tenant
    if request.code is not None:
        fields |= {"code": request.code.value, "error": record.error}
    for name, moment in (
        ("queue_s", record.first_scheduled),
        ("first_token_s", record.first_token),
        ("total_s", request.at),
    ):
        if moment is not None:
            fields[name] = round(moment - record.arrival, 6)
    return fields


def _as_sent(prompt: Prompt) -> str | list[int] | list[dict[str, str]]:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, TokenPrompt):
        return list(prompt.ids)
    return [message._asdict() for message in prompt.messages]


def _word(value: object) -> str:
    """Quoted unless it is one plain word; a client's line break stays inside its quotes."""
    text = str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text, re.ASCII) else json.dumps(text)


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line |= {"message": "request ended", **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
