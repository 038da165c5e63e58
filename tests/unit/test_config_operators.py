"""The settings of what operators see and limit: known names only, and they arrive."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from chairlift.calls import Limits, WireSettings
from chairlift.config import EngineConfig, load_config
from chairlift.errors import RequestError
from chairlift.protocol import parse
from chairlift_client.settings import parse_assignments

ABSENT = Path("/no/model.json")


def test_limits_come_from_the_command_line() -> None:
    given = json.dumps(parse_assignments(['limits={"prompt_bytes": 10, "samples": 2}']))
    limits = Limits(**load_config(ABSENT, given).limits)
    assert (limits.prompt_bytes, limits.samples) == (10, 2)
    assert limits.stop_strings == Limits().stop_strings


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"promt_bytes": 10}, "unknown limit 'promt_bytes'"),
        ({"samples": 0}, "'samples' must be 1 or more"),
        ({"samples": "many"}, "limits.samples"),
        ({"samples": 1.5}, "limits.samples"),
    ],
)
def test_senseless_limits_are_refused(limits: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(ABSENT, json.dumps({"limits": limits}))


def test_every_limit_can_be_set() -> None:
    everything = {field.name: 3 for field in fields(Limits)}
    assert Limits(**EngineConfig(limits=everything).limits) == Limits(**everything)


def test_a_limit_refuses_the_request_that_exceeds_it_by_name() -> None:
    import numpy as np

    def text(value: str) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
        return np.array([[value.encode()]], dtype=np.object_)

    wire = WireSettings(limits=Limits(prompt_bytes=8))
    assert parse({"text_input": text("12345678")}, {}, "", wire, ["text_output"])
    with pytest.raises(RequestError, match="text_input.*8"):
        parse({"text_input": text("123456789")}, {}, "", wire, ["text_output"])


@pytest.mark.parametrize(("text", "expected"), [('"true"', True), ("false", False)])
def test_report_metrics_under_vllm_backends_name(text: str, expected: bool) -> None:
    config = load_config(ABSENT, f'{{"REPORT_CUSTOM_METRICS": {text}}}')
    assert config.report_metrics is expected


def test_prompts_are_not_logged_unless_asked() -> None:
    assert EngineConfig().log_prompts is False


def test_config_pbtxt_may_use_the_names_of_others(tmp_path: Path) -> None:
    """Both backends keep theirs there; model.json goes before it, by whatever name."""
    variant = {"REPORT_CUSTOM_METRICS": "false", "tokenizer_dir": "/t", "kv_cache_x": "1"}
    config = load_config(ABSENT, None, variant)
    assert not config.report_metrics and config.tokenizer == "/t"
    (tmp_path / "model.json").write_text('{"report_metrics": true, "tokenizer": "/u"}')
    config = load_config(tmp_path / "model.json", None, variant)
    assert config.report_metrics and config.tokenizer == "/u"
    with pytest.raises(ValueError, match="two of its names"):
        load_config(ABSENT, '{"tokenizer": "/t", "tokenizer_dir": "/u"}')
