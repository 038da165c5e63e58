"""The sampler by request option."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from chairlift.penalties import TokenCounts
from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow
from tests.unit.sampling_harness import CPU, GREEDY, VOCAB, generate, logits_of, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 511, 512, 1000, 4096 + 13])
def test_greedy_is_argmax_and_the_lowest_id_wins_a_tie(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (logits_of(6, 3, vocab_size) * 2).round().to(dtype)
    expected = [values.index(max(values)) for values in logits.tolist()]
    rows = [row(GREEDY, i) for i in range(6)]
    assert Sampler(vocab_size, CPU).sample(logits, rows).token_ids == expected


def test_an_empty_batch_is_no_error() -> None:
    assert Sampler(VOCAB, CPU).sample(logits_of(0), []).token_ids == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_everything_is_invalid(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    banned = row(params, bad_word_ids=tuple((token,) for token in range(VOCAB)))
    assert Sampler(VOCAB, CPU).sample(logits_of(1), [banned]).invalid == [True]


def test_bad_words_are_banned_where_their_beginning_was_generated() -> None:
    logits = torch.zeros(VOCAB)
    logits[[1, 2, 3, 4]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    words: tuple[tuple[int, ...], ...] = ((1,), (2, 2), (2, 3, 2), ())
    output = generate(Sampler(VOCAB, CPU), GREEDY, 6, logits=logits, bad_word_ids=words)
    assert output == [2, 3, 3, 2, 3, 3]


def test_ids_outside_the_vocabulary_touch_no_other_row() -> None:
    logits = logits_of(3)
    outside = (-1, VOCAB, VOCAB + 5, 10**9)
    params = SamplingParams(
        temperature=0.0,
        min_tokens=3,
        stop_token_ids=outside,
        logit_bias=tuple((token, 100.0) for token in outside),
        repetition_penalty=1.5,
    )
    words = tuple((token,) for token in outside)
    strange = row(params, 1, prompt_ids=outside, eos_ids=frozenset(outside), bad_word_ids=words)
    batch = [row(replace(GREEDY, logit_bias=((0, 0.0),)), 0), strange, row(GREEDY, 2)]
    assert Sampler(VOCAB, CPU).sample(logits, batch).token_ids == logits.argmax(1).tolist()


def test_counts_follow_new_tokens_and_start_again_after_a_rollback() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(50) for _ in range(30)]
    counts = TokenCounts(prompt, VOCAB)
    output: list[int] = []
    for _ in range(200):
        output += [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
        assert counts.continues_with(output)
        counts.count(output)
        found = dict(zip(counts.ids.tolist(), counts.generated.tolist(), strict=True))
        assert found == {token: output.count(token) for token in {*prompt, *output}}
    assert not counts.continues_with(output[:-1])
    assert not counts.continues_with([*output[:-1], output[-1] + 1])


def test_a_rolled_back_or_forgotten_request_is_counted_anew() -> None:
    params = replace(GREEDY, frequency_penalty=5.0, repetition_penalty=1.3)
    kept = Sampler(VOCAB, CPU)
    logits = logits_of(1)
    for output in ([1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 7, 7, 7], list(range(30))):
        asked = row(params, 1, prompt_ids=[5, 6], output_ids=output)
        fresh = Sampler(VOCAB, CPU).sample(logits, [asked])
        assert kept.sample(logits, [asked]).token_ids == fresh.token_ids
        if len(output) == 2:
            kept.release(1)
    kept.release(12345)


def test_a_key_used_again_with_other_settings_starts_afresh() -> None:
    sampler, logits = Sampler(VOCAB, CPU), logits_of(1)
    best = int(logits.argmax())
    ban = row(replace(GREEDY, logit_bias=((best, -100.0),)), 1)
    assert sampler.sample(logits, [ban]).token_ids != [best]
    assert sampler.sample(logits, [row(GREEDY, 1)]).token_ids == [best]


def test_plain_greedy_rows_do_no_other_work() -> None:
    """Nobody asks for noise, so noise that cannot be made does not matter."""

    class NoNoise:
        def keys(self, places: object) -> torch.Tensor:
            raise AssertionError

        at = everywhere = keys

    logits = logits_of(4)
    rows: list[SamplingRow] = [row(GREEDY, i) for i in range(4)]
    sampler = Sampler(VOCAB, CPU, NoNoise())  # type: ignore[arg-type]
    assert sampler.sample(logits, rows).token_ids == logits.argmax(1).tolist()
