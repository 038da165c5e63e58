"""One line per request, whatever a client puts into its id; prompts only where asked for."""

from __future__ import annotations

import json
import logging

import pytest

from chairlift.calls import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from chairlift.errors import ErrorCode
from chairlift.observations import Ended
from chairlift.request_log import JsonLines, RequestLog
from tests.unit.metrics_harness import answer

SECRET = TextPrompt("a secret prompt")


def ended(code: ErrorCode | None = None, prompt: Prompt = SECRET, **changes: object) -> Ended:
    usual = {
        "request_id": "r1",
        "finish_reasons": ["length"],
        "num_output_tokens": 7,
        "first_scheduled": 100.5,
        "first_token": 101.0,
    }
    record = answer(3, **{**usual, **changes}).record
    return Ended(record, prompt, code, 102.0)


def lines(caplog: pytest.LogCaptureFixture, *requests: Ended, prompts: bool = False) -> list[str]:
    log = RequestLog(enabled=True, prompts=prompts)
    with caplog.at_level(logging.INFO, "chairlift"):
        for request in requests:
            log.ended(request)
    return [record.getMessage() for record in caplog.records]


def test_a_request_that_went_well(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, ended()) == [
        "request ended: request_id=r1 number=3 finish=length prompt_tokens=10 cached_tokens=0 "
        "output_tokens=7 queue_s=0.5 first_token_s=1.0 total_s=2.0"
    ]


def test_a_request_that_failed_in_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    request = ended(
        ErrorCode.UNAVAILABLE,
        finish_reasons=[],
        first_scheduled=None,
        first_token=None,
        num_output_tokens=0,
        error="Request timeout expired",
        tenant="a",
    )
    (line,) = lines(caplog, request)
    assert "finish=error prompt_tokens=10" in line
    assert 'tenant=a code=UNAVAILABLE error="Request timeout expired" total_s=2.0' in line
    assert "queue_s" not in line


def test_a_line_break_in_an_id_makes_no_second_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, ended(request_id='x\nE0101 fake: "all is lost"'))
    assert "\n" not in line
    assert r'request_id="x\nE0101 fake: \"all is lost\""' in line


def test_prompts_are_logged_only_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert "secret" not in lines(caplog, ended())[0]
    assert 'prompt="a secret prompt"' in lines(caplog, ended(), prompts=True)[1]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (TokenPrompt((1, 2)), "[1, 2]"),
        (ChatPrompt((Message("user", "hi"),)), '[{"role": "user", "content": "hi"}]'),
    ],
)
def test_other_prompts_are_logged_as_they_were_sent(
    caplog: pytest.LogCaptureFixture, prompt: Prompt, shown: str
) -> None:
    lines(caplog, ended(prompt=prompt), prompts=True)
    assert f'"prompt": {shown}}}' in JsonLines().format(caplog.records[0])


def test_switched_off_it_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chairlift"):
        RequestLog(enabled=False, prompts=True).ended(ended())
    assert not caplog.records


def test_json_lines_carry_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    lines(caplog, ended(request_id="grün\n"))
    text = JsonLines().format(caplog.records[0])
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "request ended" and line["level"] == "info"
    assert line["request_id"] == "grün\n"
    assert (line["prompt_tokens"], line["output_tokens"], line["total_s"]) == (10, 7, 2.0)
    assert "prompt" not in line


def test_json_lines_carry_exceptions() -> None:
    logger = logging.getLogger("chairlift.test")
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logger.makeRecord("chairlift.test", logging.ERROR, "f", 1, "it %s", ("failed",), info)
    line = json.loads(JsonLines().format(record))
    assert line["message"] == "it failed"
    assert "ValueError: broken" in line["exception"]
