"""The sampler by request option, and the faults of other servers that it must not have."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from chairlift.penalties import TokenCounts
from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow
from tests.unit.sampling_harness import CPU, row

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def logits_of(count: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def generate(
    sampler: Sampler,
    params: SamplingParams,
    length: int,
    *,
    logits: torch.Tensor | None = None,
    neighbours: int = 0,
    first: bool = False,
    **fields: object,
) -> list[int]:
    """Draw ``length`` tokens of one request; every position has its own logits, if none are given.

    ``neighbours`` penalised requests with prompts of other lengths share each batch.
    """
    output: list[int] = []
    loud = SamplingParams(temperature=0.9, repetition_penalty=2.0, frequency_penalty=1.05)
    beside = [row(loud, 100 + i, prompt_ids=[i] * (5 + 40 * i)) for i in range(neighbours)]
    for position in range(length):
        own = logits if logits is not None else logits_of(1, position)[0]
        mine = row(params, 1, position=position, output_ids=output, **fields)
        rows = [mine, *beside] if first else [*beside, mine]
        batch = torch.stack([own if r is mine else logits_of(1, 50 + r.uid)[0] for r in rows])
        output.append(sampler.sample(batch, rows).token_ids[rows.index(mine)])
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 511, 512, 1000, 4096 + 13])
def test_greedy_is_argmax_and_the_lowest_id_wins_a_tie(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (logits_of(6, 3, vocab_size) * 2).round().to(dtype)
    expected = [values.index(max(values)) for values in logits.tolist()]
    rows = [row(GREEDY, i) for i in range(6)]
    assert Sampler(vocab_size, CPU).sample(logits, rows).token_ids == expected


def test_an_empty_batch_is_no_error() -> None:
    assert Sampler(VOCAB, CPU).sample(logits_of(0), []).token_ids == []


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-38, 0.0])
@pytest.mark.parametrize("top_p", [0.95, 1e-4, 1.0])
def test_p2_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = (logits_of(8) * 1e4).bfloat16()
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=50)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, i) for i in range(8)])
    assert sampled.token_ids == logits.float().argmax(1).tolist()
    assert sampled.invalid == [False] * 8


def test_p2_a_temperature_just_above_does_not_overflow() -> None:
    logits = logits_of(8)
    params = SamplingParams(temperature=1.1e-4, top_p=0.95)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, i) for i in range(8)])
    assert sampled.token_ids == logits.argmax(1).tolist()


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 10 * VOCAB])
def test_p4_top_k_that_means_off(top_k: int) -> None:
    logits = logits_of(40)
    off = [row(SamplingParams(), i, position=i) for i in range(40)]
    given = [r._replace(params=SamplingParams(top_k=top_k)) for r in off]
    expected = Sampler(VOCAB, CPU).sample(logits, off).token_ids
    assert Sampler(VOCAB, CPU).sample(logits, given).token_ids == expected


def test_p4_top_k_of_one_is_greedy_even_among_equals() -> None:
    logits = torch.zeros(20, VOCAB)
    logits[:, [5, 9]] = 1.0
    rows = [row(SamplingParams(top_k=1), i, position=i) for i in range(20)]
    assert Sampler(VOCAB, CPU).sample(logits, rows).token_ids == [5] * 20


def test_p5_every_64_bit_seed_is_its_own_and_repeats() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    texts = [generate(Sampler(VOCAB, CPU), SamplingParams(), 12, seed=seed) for seed in seeds]
    assert texts == [
        generate(Sampler(VOCAB, CPU), SamplingParams(), 12, seed=seed) for seed in seeds
    ]
    assert len({tuple(text) for text in texts}) == len(seeds)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_p9_forced_end_comes_after_exactly_min_tokens(min_tokens: int) -> None:
    """Neither of two end tokens nor a stop token comes early, not even by a bias."""
    params = replace(
        GREEDY,
        min_tokens=min_tokens,
        stop_token_ids=(9,),
        logit_bias=((2, 100.0), (3, 60.0), (9, 60.0)),
    )
    ends = frozenset({2, 3})
    output = generate(Sampler(VOCAB, CPU), params, min_tokens + 1, eos_ids=ends)
    assert not {2, 3, 9} & set(output[:min_tokens])
    assert output[min_tokens] == 2


def test_p9_ignored_ends_are_ordinary_tokens() -> None:
    params = replace(GREEDY, min_tokens=5, ignore_eos=True, logit_bias=((2, 100.0),))
    assert generate(Sampler(VOCAB, CPU), params, 3, eos_ids=frozenset({2})) == [2, 2, 2]


def test_p12_greedy_stays_greedy_among_sampled_rows() -> None:
    logits = logits_of(3)
    zero = SamplingParams(temperature=0.0, seed=5, top_p=0.5, top_k=3)
    loud = SamplingParams(temperature=2.0)
    for attempt in range(10):
        rows = [row(loud, 0, seed=attempt), row(zero, 1, seed=attempt), row(loud, 2)]
        assert Sampler(VOCAB, CPU).sample(logits, rows).token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize("first", [True, False])
def test_c1_penalised_neighbours_change_nobody_else(first: bool) -> None:
    penalised = replace(GREEDY, repetition_penalty=2.0)
    plain = SamplingParams(temperature=1.3, seed=4, top_k=20)
    for params in (GREEDY, penalised, plain):
        alone = generate(Sampler(VOCAB, CPU), params, 10, prompt_ids=[4, 5])
        beside = generate(
            Sampler(VOCAB, CPU), params, 10, prompt_ids=[4, 5], neighbours=3, first=first
        )
        assert alone == beside


def test_c2_only_own_tokens_are_counted() -> None:
    """A short prompt beside long ones: no padding gets into the counts."""
    logits = torch.zeros(VOCAB)
    logits[:4] = torch.tensor([3.0, 2.5, 2.2, 2.0])
    params = replace(GREEDY, frequency_penalty=1.05)
    alone = generate(Sampler(VOCAB, CPU), params, 8, logits=logits, prompt_ids=[1])
    beside = generate(Sampler(VOCAB, CPU), params, 8, logits=logits, prompt_ids=[1], neighbours=4)
    assert alone == beside
    assert alone[:4] == [0, 1, 2, 3]


def test_c5_seeded_draws_go_on_from_token_to_token() -> None:
    """60 tokens from flat logits repeat as often as chance has it, and seeds differ."""
    flat = torch.zeros(VOCAB)
    params = SamplingParams(temperature=1.5)
    texts = [generate(Sampler(VOCAB, CPU), params, 60, logits=flat, seed=s) for s in range(30)]
    ratio = sum(len(set(text)) for text in texts) / (30 * 60)
    expected = VOCAB * (1 - (1 - 1 / VOCAB) ** 60) / 60
    assert abs(ratio - expected) < 0.1 * expected
    assert len({tuple(text) for text in texts}) == 30


def test_c6_samples_of_one_request_differ_and_repeat() -> None:
    def samples() -> list[list[int]]:
        return [
            generate(Sampler(VOCAB, CPU), SamplingParams(n=4), 12, sample_index=i) for i in range(4)
        ]

    first = samples()
    assert len({tuple(text) for text in first}) == 4
    assert samples() == first


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=30),
        SamplingParams(top_k=300, top_p=0.5, min_p=0.01),
        replace(GREEDY, repetition_penalty=1.2, logit_bias=((3, 1.0),), logprobs=2),
    ],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [slice(None), slice(3, 4), slice(700, 701)])
def test_a6_a_poisoned_row_is_reported_and_hurts_nobody(
    params: SamplingParams, poison: float, where: slice
) -> None:
    logits = logits_of(5, 2)
    rows = [row(params, i, position=i, prompt_ids=[3]) for i in range(5)]
    clean = Sampler(VOCAB, CPU).sample(logits, rows)
    logits[2, where] = poison
    sampled = Sampler(VOCAB, CPU).sample(logits, rows)
    harmless = poison == -float("inf") and where != slice(None)
    assert sampled.invalid == [False, False, not harmless, False, False]
    for i in (0, 1, 3, 4):
        assert sampled.token_ids[i] == clean.token_ids[i]
        assert sampled.logprobs[i] == clean.logprobs[i]
    if not harmless:
        assert sampled.logprobs[2] is None


def test_a6_a_ban_does_not_hide_the_poison() -> None:
    logits = logits_of(1)
    logits[0, 2] = float("nan")
    params = replace(GREEDY, min_tokens=5)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, eos_ids=frozenset({2}))])
    assert sampled.invalid == [True]


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
