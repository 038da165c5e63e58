"""What values mean: forms, ranges, defaults and other names; C and P are rows of the contract and
of reported-faults.md."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.calls import WireSettings
from chairlift.errors import ErrorCode, RequestError
from tests.unit.protocol_harness import VLLM, by_json, call, params, refusal


@pytest.mark.parametrize("value", [8, 8.0, "8", "8.0", " 8 "])
def test_p7_c15_forms_of_one_integer(value: object) -> None:
    assert params(max_tokens=value).max_tokens == 8
    assert by_json(max_tokens=value).params.max_tokens == 8


@pytest.mark.parametrize("value", [1, 1.0, "1", "1e0"])
def test_p7_c15_forms_of_one_number(value: object) -> None:
    assert params(temperature=value) == params(temperature=1.0)


@pytest.mark.parametrize(
    ("value", "flag"), [(True, True), ("true", True), ("False", False), (0, False)]
)
def test_c15_forms_of_a_flag(value: object, flag: bool) -> None:
    assert params(ignore_eos=value).ignore_eos is flag
    assert by_json(ignore_eos=value).params.ignore_eos is flag


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", [0, -1, 1.5, True, "x", "", [1], {}, 10**5000, float("nan"), "1_0", "٣"]),
        ("min_tokens", [-1, 1.5, True, 17]),
        ("temperature", [-0.1, "hot", True, float("inf"), 1e5, [], 10**400]),
        ("top_p", [1.0001, "x", True, float("nan")]),
        ("top_k", [-2, 1.5, "x", True]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [-1, 2**64, -(2**63) - 1, 1.5, "x", True]),
        ("repetition_penalty", [0, -1, float("inf")]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1, "x"]),
        ("n", [0, 17, 1.5, True]),
        ("logprobs", [-1, 21, "x"]),
        ("prompt_logprobs", [-1, 21]),
        ("stop", [1, [1], {"a": 1}, ["x"] * 17, "x" * 513]),
        ("stop_token_ids", ["x", [-1], [1.5], [True], [1] * 129, 2**31]),
        ("logit_bias", ["x", [1], {"abc": 1}, {"-1": 5}, {"1": "x"}, {"1": None}, {"1": 1e40}]),
        ("bad_words", [1, [None], ["x"] * 65]),
        ("ignore_eos", [2, "maybe", 1.0, []]),
        ("cache_salt", [1, "x" * 257]),
        ("deadline_ms", [0, -1, "soon"]),
        ("llm_priority", [2**31, "high", 0.5]),
        ("stream_interval", [0, 1025]),
    ],
)
def test_values_out_of_range_or_type_name_the_field(field: str, bad: list[Any]) -> None:
    """P4, P5, P7, L5: one short error with the name and the value, for every source."""
    for value in bad:
        error = refusal(VLLM, {field: value})
        assert error.code is ErrorCode.INVALID_ARG
        assert field in error.message
        assert len(error.message) < 300
        error.message.encode()


def test_l5_huge_max_tokens_are_left_to_the_context() -> None:
    for value in (2**31 - 1, 2**31, 9007199254740993, 1e18):
        assert params(max_tokens=value).max_tokens == value
    message = refusal(parameters={"max_tokens": 0}).message
    assert message.startswith("max_tokens must be a single value > 0")


def test_p2_p12_c10_when_decoding_is_greedy() -> None:
    assert params().greedy
    assert params(top_k=1, temperature=2.0).greedy
    assert params(temperature=1e-4).greedy
    assert params(temperature=1e-38, top_p=0.95, top_k=50, seed=1).greedy
    assert params(temperature=0, seed=1, top_p=0.5, top_k=3).greedy
    assert params(top_p=0.0).greedy  # off, so nothing asks for sampling
    assert params(VLLM, temperature=0).greedy
    for sampled in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not params(**sampled).greedy
    assert not params(VLLM).greedy
    assert params(WireSettings(default_sampling="random")).temperature == 1.0
    assert params(WireSettings(dialect="vllm", default_sampling="greedy")).greedy


def test_p4_c9_c11_what_is_off() -> None:
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0
    assert params(top_p=0, temperature=1) == params(top_p=1.0, temperature=1)
    assert "top_p" in refusal(VLLM, {"top_p": 0}).message
    assert params(min_p=1).min_p == 1.0


def test_p5_seeds_keep_their_64_bits() -> None:
    seeds = [params(seed=seed).seed for seed in (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, "7")]
    assert seeds == [0, 2**31, 2**63 - 1, -(2**63), -1, 7]
    assert by_json(seed=None).params.seed is None
    assert call(random_seed=2**64 - 1).params.seed == -1


def test_c12_other_names_mean_the_same() -> None:
    assert call(random_seed=3) == call(seed=3)
    assert call(min_length=3) == call(min_tokens=3)
    assert call(request_output_len=3) == call(max_tokens=3)
    assert call(stop_words=["x"]) == call(parameters={"stop": "x"})
    assert call(num_return_sequences=2) == call(parameters={"n": 2})
    assert call(seed=3, random_seed=3) == call(seed=3)
    message = refusal(seed=3, random_seed=4).message
    assert "seed" in message and "random_seed" in message


def test_c12_empty_words_are_dropped() -> None:
    """LiteLLM always sends one of each."""
    assert call(stop_words=[""], bad_words=[""]) == call()
    assert call(stop_words=[]) == call()


def test_p7_one_stop_string_or_a_list() -> None:
    assert by_json(stop="x").params.stop == by_json(stop=["x"]).params.stop == ("x",)


def test_lists_and_maps() -> None:
    found = by_json(logit_bias={"5": 500, "6": "-1"}, stop_token_ids=[1, "2"], bad_words="w").params
    assert found.logit_bias == ((5, 100.0), (6, -1.0))
    assert (found.stop_token_ids, found.bad_words) == ((1, 2), ("w",))
    assert params(logit_bias='{"5": 1}').logit_bias == ((5, 1.0),)
    assert params(stop_token_ids="[1, 2]").stop_token_ids == (1, 2)


def test_c13_the_stop_string_is_kept_by_dialect() -> None:
    assert params().include_stop_str_in_output
    assert not params(VLLM).include_stop_str_in_output
    assert not params(include_stop_str_in_output=False).include_stop_str_in_output


def test_end_id_stands_in_place_of_the_models() -> None:
    assert call(end_id=-1).params.ignore_eos
    found = call(end_id=7, pad_id=0).params
    assert (found.stop_token_ids, found.ignore_eos) == ((7,), True)
    assert not call(end_id=-1, parameters={"ignore_eos": False}).params.ignore_eos


def test_min_tokens_above_max_tokens() -> None:
    message = refusal(max_tokens=3, min_tokens=4).message
    assert message == "min_tokens 4 is more than max_tokens 3"


def test_c18_log_probabilities() -> None:
    asked = call(VLLM, {"logprobs": 2}, return_logprobs=True)
    assert (asked.params.logprobs, asked.options.logprobs_asked) == (2, True)
    null = call(VLLM, return_logprobs=True)
    assert (null.params.logprobs, null.options.logprobs_asked) == (None, False)
    for flag in ("return_cumulative_logprob", "return_log_probs"):
        assert call(**{flag: True}).params.logprobs == 0
    # OpenAI's frontend hands on its chat fields as they are.
    assert by_json(logprobs=False, top_logprobs=0).params.logprobs is None
    assert by_json(logprobs=True, top_logprobs=3).params.logprobs == 3


@pytest.mark.parametrize(
    ("field", "used", "neutral"),
    [
        ("best_of", 2, 1),
        ("use_beam_search", True, False),
        ("structured_outputs", '{"choice": ["a"]}', ""),
        ("guided_decoding", "{}", None),
        ("allowed_token_ids", [1], []),
        ("detokenize", False, True),
    ],
)
def test_unsupported_fields_are_refused_where_used(field: str, used: Any, neutral: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        by_json(**{field: used})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert by_json(**{field: neutral}) == by_json()
