"""The sampler against transformers' logits processors, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chairlift.gumbel import Place
from chairlift.penalties import (
    PenalisedRow,
    RequestEdits,
    add_changes,
    apply_penalties,
)
from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow

VOCAB = 3000
EOS = (2, 17)
GREEDY = SamplingParams(temperature=0.0)
BAD_WORDS = ((40,), (7, 8, 9), (9, 11), (7, 9, 30))
# Ends in tokens that begin two of the bad words.
OUTPUT = [100, 5, 5, 900, 7, 9]
PROMPT = [5, 6, 7, 2999, 0, 6]

EDITS: dict[str, SamplingParams] = {
    "nothing": GREEDY,
    "repetition": replace(GREEDY, repetition_penalty=1.7),
    "repetition below one": replace(GREEDY, repetition_penalty=0.6),
    "bias": replace(GREEDY, logit_bias=((3, 4.0), (7, -2.5), (2999, 100.0))),
    "min_tokens": replace(GREEDY, min_tokens=10),
    "min_tokens reached": replace(GREEDY, min_tokens=len(OUTPUT)),
    "bad words": replace(GREEDY, bad_words=("used",)),
    "presence and frequency": replace(GREEDY, presence_penalty=0.7, frequency_penalty=-0.3),
    "all": replace(
        GREEDY,
        repetition_penalty=1.3,
        logit_bias=((5, 3.0), (9, -1.0)),
        min_tokens=7,
        bad_words=("used",),
        presence_penalty=-0.4,
        frequency_penalty=0.9,
    ),
}

FILTERS: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 50},
    "top_k beyond the candidates": {"top_k": 700},
    "top_p": {"top_p": 0.9},
    "wide top_p": {"top_p": 0.97, "temperature": 3.0},
    "min_p": {"min_p": 0.05},
    "low min_p": {"min_p": 1e-4, "temperature": 2.0},
    "temperature and all": {"temperature": 0.8, "min_p": 0.01, "top_k": 60, "top_p": 0.8},
    "hot and all": {"temperature": 2.5, "min_p": 1e-3, "top_k": 400, "top_p": 0.95},
}


def bad_words_of(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    return BAD_WORDS if params.bad_words else ()


def presence_and_frequency(params: SamplingParams) -> Callable[..., torch.Tensor]:
    """OpenAI's formula; transformers has none."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB)
        subtracted = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return scores - subtracted

    return process


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' scores [V] for prompt and output; bad words look at the output only."""
    ids = torch.tensor([PROMPT + OUTPUT])
    scores = logits.unsqueeze(0).clone()
    if params.bad_words:
        words = [list(word) for word in BAD_WORDS]
        scores = NoBadWordsLogitsProcessor(words)(torch.tensor([OUTPUT]), scores)
    chain = LogitsProcessorList()
    chain.append(
        MinNewTokensLengthLogitsProcessor(
            len(PROMPT), params.min_tokens, list(EOS), device=torch.device("cpu")
        )
    )
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias]))
    chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(presence_and_frequency(params))
    if params.temperature > 0:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    return chain(ids, scores)[0]


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(logits: torch.Tensor, many: list[SamplingParams]) -> torch.Tensor:
    """Our edits of a batch with one row per entry of ``many``."""
    work, changes, penalised = logits.clone(), [], []
    for n, params in enumerate(many):
        edits = RequestEdits(params, frozenset(EOS), bad_words_of(params), VOCAB)
        changes += [(n, change) for change in edits.changes(OUTPUT)]
        if edits.penalised:
            penalised.append(PenalisedRow(n, params, edits.counts(PROMPT, OUTPUT)))
    add_changes(work, changes)
    apply_penalties(work, penalised)
    return work


@pytest.mark.parametrize("params", EDITS.values(), ids=EDITS.keys())
def test_edits_alone(params: SamplingParams) -> None:
    logits = random_logits(1)
    torch.testing.assert_close(
        edited(logits, [params])[0], reference(logits[0], params), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", EDITS)
def test_rows_that_need_no_edit_say_so(name: str) -> None:
    params = EDITS[name]
    edits = RequestEdits(params, frozenset(EOS), bad_words_of(params), VOCAB)
    assert edits.wanted(len(OUTPUT)) == (name not in ("nothing", "min_tokens reached"))


def test_edits_in_a_mixed_batch() -> None:
    many = [*EDITS.values(), *reversed(EDITS.values())]
    logits = random_logits(len(many), 1)
    expected = torch.stack([reference(x, p) for x, p in zip(logits, many, strict=True)])
    torch.testing.assert_close(edited(logits, many), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_of_a_mixed_batch() -> None:
    many = list(EDITS.values()) * 3
    logits = random_logits(len(many), 2)
    rows = [sampling_row(params, uid) for uid, params in enumerate(many)]
    expected = [int(reference(x, p).argmax()) for x, p in zip(logits, many, strict=True)]
    assert Sampler(VOCAB, "cpu").sample(logits, rows).token_ids == expected


def sampling_row(params: SamplingParams, uid: int, token: int = 0) -> SamplingRow:
    return SamplingRow(
        params, 1, token, 0, PROMPT, OUTPUT, uid, frozenset(EOS), bad_words_of(params)
    )


class Probe:
    """Noise that lets a draw decide between two tokens of each row by their scores.

    The token ``sample_index`` gets ``lift`` and the best one (``position``) nothing, all others
    are out: the first is drawn if it was kept and its score is less than ``lift`` below.
    """

    def __init__(self, lift: float) -> None:
        self._lift = lift

    def keys(self, places: list[Place]) -> torch.Tensor:
        return torch.tensor([(place.sample_index, place.position) for place in places])

    def at(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        noise = torch.where(token_ids == keys[:, 1:], 0.0, -1e9)
        return torch.where(token_ids == keys[:, :1], self._lift, noise)

    def everywhere(self, keys: torch.Tensor) -> torch.Tensor:
        return self.at(keys, torch.arange(VOCAB).unsqueeze(0))


def survives(
    logits: torch.Tensor,
    params: list[SamplingParams],
    tokens: list[int],
    lift: float,
    bests: list[int],
) -> list[bool]:
    """Of each row, whether ``token`` beats the best one with ``lift`` added to its score."""
    rows = [
        sampling_row(p, uid, token)._replace(position=best)
        for uid, (p, token, best) in enumerate(zip(params, tokens, bests, strict=True))
    ]
    drawn = Sampler(VOCAB, "cpu", Probe(lift)).sample(logits, rows).token_ids  # type: ignore[arg-type]
    return [token == wanted for token, wanted in zip(drawn, tokens, strict=True)]


def asked_tokens(scores: torch.Tensor, logits: torch.Tensor) -> list[int]:
    """Kept and dropped tokens next to the edge, and some of all others."""
    count = int(scores.isfinite().sum())
    kept = scores.argsort(descending=True)[:count].tolist()
    dropped = logits.argsort(descending=True)
    dropped = dropped[~torch.isin(dropped, torch.tensor(kept))].tolist()
    return kept[-15:] + kept[:5] + dropped[:15] + dropped[::500]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("base", ["nothing", "all"])
def test_filters_keep_the_same_tokens(name: str, base: str) -> None:
    params = replace(EDITS[base], **{"temperature": 1.0, **FILTERS[name]})
    logits = random_logits(1, 3)[0]
    scores = reference(logits, params)
    asked = asked_tokens(scores, edited(logits.unsqueeze(0), [params])[0])
    count, best = len(asked), int(scores.argmax())
    found = survives(logits.expand(count, -1), [params] * count, asked, 1e6, [best] * count)
    assert found == scores.isfinite()[asked].tolist()


def test_filters_and_edits_in_one_mixed_batch() -> None:
    """All combinations in one call: a kept and a dropped token of each."""
    many = [
        replace(edits, **{"temperature": 1.0, **filters})
        for edits in EDITS.values()
        for filters in FILTERS.values()
    ]
    logits = random_logits(len(many), 4)
    scores = [reference(x, p) for x, p in zip(logits, many, strict=True)]
    asked = [asked_tokens(s, x) for s, x in zip(scores, edited(logits, many), strict=True)]
    bests = [int(s.argmax()) for s in scores]
    for pick in (0, 14, 15, -1):
        tokens = [tokens[min(pick, len(tokens) - 1)] for tokens in asked]
        found = survives(logits, many, tokens, 1e6, bests)
        assert found == [bool(s.isfinite()[t]) for s, t in zip(scores, tokens, strict=True)]


@pytest.mark.parametrize("name", FILTERS)
def test_scores_equal_within_a_ten_thousandth(name: str) -> None:
    """A token wins with its distance from the best plus 1e-4, and loses with 1e-4 less."""
    params = replace(EDITS["all"], **{"temperature": 1.0, **FILTERS[name]})
    logits = random_logits(1, 5)[0]
    scores = reference(logits, params)
    order = scores.argsort(descending=True)[: int(scores.isfinite().sum())].tolist()
    for token in (order[1], order[len(order) // 2], order[-1]):
        distance = float(scores[order[0]] - scores[token])
        for margin, wins in ((1e-4, True), (-1e-4, False)):
            found = survives(logits.unsqueeze(0), [params], [token], distance + margin, order[:1])
            assert found == [wins]
