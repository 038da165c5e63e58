"""What clients get to see: shapes, texts and log-probabilities as vllm_backend and TRT-LLM send."""

from __future__ import annotations

import json
from typing import Any

from chairlift.calls import OutputOptions, WireSettings
from chairlift.request import FinishReason, TokenLogprobs
from chairlift.responses import RequestFacts, SequenceDelta, encode

TRTLLM = WireSettings()
VLLM = WireSettings(dialect="vllm", batched=False)
FACTS = RequestFacts(5, batch_index=1, prompt_text="Say: ")


def send(
    *deltas: SequenceDelta, wire: WireSettings = VLLM, facts: RequestFacts = FACTS, **options: Any
) -> dict[str, Any]:
    tensors = encode(deltas, lambda: facts, OutputOptions(**options), wire, lambda i: f"<{i}>")
    return {name: array.tolist() for name, array in tensors.items()}


def test_only_what_was_asked_for_and_text_first() -> None:
    assert send(SequenceDelta("hé")) == {"text_output": ["hé".encode()]}
    outputs = ("text_output", "finish_reason")
    found = send(SequenceDelta("a"), wire=TRTLLM, outputs=outputs)
    assert found == {"text_output": [b"a"], "finish_reason": [[b"None"]]}


def test_an_echo_stands_in_front_of_every_sample() -> None:
    found = send(SequenceDelta("a"), SequenceDelta("b"), echo=True, grouped=True)
    assert found == {"text_output": [b"Say: a", b"Say: b"]}


def test_samples_of_one_response_have_a_place_each() -> None:
    outputs = ("text_output", "finish_reason", "cumulative_logprob", "num_output_tokens")
    found = send(
        SequenceDelta("a", (1, 2), FinishReason.LENGTH, 0, -1.5),
        SequenceDelta("b", (3,), FinishReason.STOP, 1, -0.5),
        outputs=(*outputs, "num_input_tokens"),
    )
    assert found == {
        "text_output": [b"a", b"b"],
        "finish_reason": [b"length", b"stop"],
        "cumulative_logprob": [-1.5, -0.5],
        "num_output_tokens": [2, 1],
        "num_input_tokens": [5],
    }


def test_c16_an_unfinished_sequence_says_none() -> None:
    found = send(SequenceDelta("a"), outputs=("text_output", "finish_reason"))
    assert found["finish_reason"] == [b"None"]


def test_logprobs_as_vllm_backend_writes_them() -> None:
    """The chosen token and the most likely ones: k or k + 1 entries, one of rank 1."""
    top = ((7, -0.25), (8, -1.5))
    entries = (TokenLogprobs(-0.25, 1, top), TokenLogprobs(-4.0, 9, top))
    delta = SequenceDelta("ab", (7, 5), None, 0, -4.25, entries)
    found = send(delta, outputs=("text_output", "logprobs"), logprobs_asked=True)
    first, second = json.loads(found["logprobs"][0])
    assert first == {
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": "<7>"},
        "8": {"logprob": -1.5, "rank": 2, "decoded_token": "<8>"},
    }
    assert list(second) == ["5", "7", "8"]
    assert second["5"] == {"logprob": -4.0, "rank": 9, "decoded_token": "<5>"}


def test_logprobs_that_nobody_set_are_null() -> None:
    assert send(SequenceDelta("a", (1,)), outputs=("logprobs",))["logprobs"] == [b"null"]


def test_a_banned_tokens_logprob_is_still_json() -> None:
    entry = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, float("-inf"))))
    found = send(
        SequenceDelta("a", (1,), logprobs=(entry,)), outputs=("logprobs",), logprobs_asked=True
    )
    (token,) = json.loads(found["logprobs"][0])
    assert token["2"]["logprob"] == -9999.0


def test_prompt_logprobs_begin_with_null_and_come_once() -> None:
    entry = TokenLogprobs(-0.5, 1, ())
    facts = RequestFacts(2, prompt_ids=(3, 4), prompt_logprobs=(None, entry))
    found = send(SequenceDelta("a"), facts=facts, outputs=("prompt_logprobs",))
    assert json.loads(found["prompt_logprobs"][0]) == [
        None,
        {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "<4>"}},
    ]
    assert send(SequenceDelta("a"), outputs=("prompt_logprobs",)) == {}


def test_trtllms_log_probabilities_are_a_matrix() -> None:
    entries = (TokenLogprobs(-0.5, 1, ()), TokenLogprobs(-0.25, 1, ()))
    delta = SequenceDelta("ab", (1, 2), None, 0, -0.75, entries)
    found = send(delta, wire=TRTLLM, outputs=("cum_log_probs", "output_log_probs"))
    assert found == {"cum_log_probs": [[-0.75]], "output_log_probs": [[[-0.5, -0.25]]]}
    short = SequenceDelta("a", (1,), logprobs=entries[:1])
    found = send(delta, short, outputs=("output_log_probs",))
    assert found["output_log_probs"] == [[-0.5, -0.25], [-0.5, 0.0]]


def test_perf_outputs_are_sent_as_far_as_they_are_known() -> None:
    facts = RequestFacts(5, reused_blocks=2, arrival_ns=1_700_000_000_000_000_000)
    names = ("kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "arrival_time_ns")
    found = send(SequenceDelta("a"), facts=facts, wire=TRTLLM, outputs=names)
    assert found == {
        "kv_cache_reused_blocks": [[2]],
        "arrival_time_ns": [[1_700_000_000_000_000_000]],
    }


def test_rows_and_samples_are_numbered() -> None:
    names = ("batch_index", "sequence_index")
    found = send(SequenceDelta("a", sample_index=3), wire=TRTLLM, outputs=names)
    assert found == {"batch_index": [[1]], "sequence_index": [[3]]}
