"""Log-probabilities, ranks and alternatives against a full log-softmax and sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.request import SamplingParams, TokenLogprobs
from chairlift.sampler import Sampler
from tests.unit.sampling_harness import CPU, row


def expected(logits: torch.Tensor, chosen: int, top_n: int) -> TokenLogprobs:
    logprobs = logits.double().log_softmax(0)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    return TokenLogprobs(
        float(logprobs[chosen]),
        int((logits > logits[chosen]).sum()) + 1,
        tuple((token, float(logprobs[token])) for token in order[:top_n]),
    )


def check(report: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert report.chosen == pytest.approx(wanted.chosen, abs=1e-4)
    assert report.rank == wanted.rank
    assert [token for token, _ in report.top] == [token for token, _ in wanted.top]
    assert [p for _, p in report.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)
    assert report.chosen <= 0.0
    assert math.fsum(math.exp(p) for _, p in report.top) <= 1.0 + 1e-5


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.sampled_from([5, 70, 1000, 3000]),
    top_n=st.sampled_from([0, 1, 5, 20, 63, 64, 200]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    bfloat16=st.booleans(),
    seed=st.integers(0, 100),
)
def test_prompt_logprobs_equal_log_softmax(
    vocab_size: int, top_n: int, spread: float, bfloat16: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab_size, generator=generator) * spread + 30.0
    if bfloat16:
        logits = logits.bfloat16()
    next_ids = torch.randint(0, vocab_size, (4,), generator=generator).tolist()
    reports = Sampler(vocab_size, CPU).prompt_logprobs(logits, next_ids, top_n)
    for values, chosen, report in zip(logits, next_ids, reports, strict=True):
        check(report, expected(values.float(), chosen, top_n))


def test_a_long_prompt_goes_in_parts() -> None:
    logits = torch.randn(150, 300, generator=torch.Generator().manual_seed(0))
    next_ids = [(7 * i) % 300 for i in range(150)]
    reports = Sampler(300, CPU).prompt_logprobs(logits, next_ids, 2)
    assert len(reports) == 150
    for i in (0, 63, 64, 149):
        check(reports[i], expected(logits[i], next_ids[i], 2))


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1))
    wanted = [3, None, 0, 7]
    rows = [row(SamplingParams(logprobs=n), i, position=i) for i, n in enumerate(wanted)]
    sampled = Sampler(500, CPU).sample(logits, rows)
    for values, token, n, report in zip(
        logits, sampled.token_ids, wanted, sampled.logprobs, strict=True
    ):
        if n is None:
            assert report is None
        else:
            assert report is not None
            check(report, expected(values, token, n))


def test_reports_are_of_the_model_and_not_of_what_was_made_of_its_logits() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    best = int(logits.argmax())
    params = SamplingParams(
        temperature=0.0, logprobs=2, logit_bias=((best, -100.0),), repetition_penalty=1.5
    )
    sampled = Sampler(500, CPU).sample(logits, [row(params, prompt_ids=[best, 4])])
    (report,) = sampled.logprobs
    assert report is not None
    assert report.top[0][0] == best
    assert report.rank == 2
    check(report, expected(logits[0], sampled.token_ids[0], 2))


def test_the_greedy_token_is_first_among_equals() -> None:
    logits = torch.zeros(2, 5000).bfloat16()
    logits[:, [4000, 300, 20]] = 2.0
    rows = [row(SamplingParams(temperature=0.0, logprobs=2), i) for i in range(2)]
    sampled = Sampler(5000, CPU).sample(logits, rows)
    for token, report in zip(sampled.token_ids, sampled.logprobs, strict=True):
        assert report is not None
        assert (token, report.rank) == (20, 1)
        assert [token for token, _ in report.top] == [20, 300]
