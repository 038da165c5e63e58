"""From logits to tokens for a whole batch, doing for each row only what its request asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from chairlift_kernels.launch_table import TOP_TOKENS

from .device_copies import HostCopy, to_device
from .draw import draw
from .draw_kernels import draw_on_device
from .gumbel import GumbelNoise, Noise, Place
from .logprob_kernels import token_logprobs_on_device
from .logprobs import token_logprobs
from .penalties import (
    PenalisedRow,
    RequestEdits,
    add_changes,
    apply_penalties,
)
from .penalty_kernels import CountTables, Penalised
from .request import SamplingParams, TokenLogprobs
from .rowwise import best_token, padded_width

# At this temperature a gap of 1e-3 between logits is already e^10; lower ones only overflow.
GREEDY_TEMPERATURE = 1e-4
# prompt_logprobs of a long prompt must not need a float32 copy of all its logits at once.
LOGPROB_ROWS = 64
# The kernels make none; 256 rows of 152 k logits with 20 alternatives take 1.5 MiB of scratch.
LOGPROB_ROWS_ON_DEVICE = 256


class SamplingRow(NamedTuple):
    """One row of logits and the request it belongs to.

    ``position`` is the index in the sequence of the token to be drawn; ``uid`` is the key of one
    sequence: the samples of ``n > 1`` have different ones.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    uid: int
    eos_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class Sampled(NamedTuple):
    """Per row: the token, its report if asked for, and whether the logits were unusable.

    An invalid row had a NaN or infinite best logit, or every token banned; its token means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    invalid: list[bool]


class Draws(NamedTuple):
    """Tokens drawn on the device: ``ids`` int64 [S], of which the n-th is row ``order[n]``'s.

    On their way to the host are these and ``host_best`` [S], which is finite where the row's logits
    can be used.

    ``logits`` are kept only where somebody wants a report of them: the next step needs the memory.
    """

    logits: torch.Tensor | None
    rows: Sequence[SamplingRow]
    order: list[int]
    ids: torch.Tensor
    host_ids: HostCopy
    host_best: HostCopy


class Sampler:
    """Chooses the next token of each row; the same request gets the same tokens in any batch.

    ``noise`` gives Gumbel noise by (seed, sample index, position, token id). With ``kernels`` it is
    the Triton-lang kernels that penalise, draw, which make that noise themselves, and report.
    ``best_token`` is ``rowwise.best_token`` or an operator that does the same.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        noise: Noise | None = None,
        *,
        kernels: bool = False,
        best_token: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = best_token,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._kernels = kernels
        self._best_token = best_token
        self._counts = CountTables(vocab_size, self._device)
        self._noise = noise or GumbelNoise(vocab_size, self._device)
        self._requests: dict[int, _Request] = {}
        self._scratch = self._empty_rows(0)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """One token per row of ``logits`` [S, V] in any float type, which are left as they are."""
        return self.collect(self.launch(logits, rows))

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draws:
        """Draw on the device; ``collect`` brings what was drawn to the host."""
        if not rows:
            none = torch.empty(0, dtype=torch.int64, device=self._device)
            return Draws(None, rows, [], none, HostCopy(none), HostCopy(none))
        requests = [self._request(row) for row in rows]
        edited = [
            r.edits is not None and r.edits.wanted(len(row.output_ids))
            for r, row in zip(requests, rows, strict=True)
        ]
        drawn = [i for i, r in enumerate(requests) if not r.greedy]
        argmax_edited = [i for i, r in enumerate(requests) if r.greedy and edited[i]]
        plain = [i for i, r in enumerate(requests) if r.greedy and not edited[i]]
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        if plain:
            found.append(self._best_token(self._take(logits, plain)))
        copied = drawn + argmax_edited
        if copied:
            work = self._copy(logits, copied)
            self._edit(work, [(n, rows[i]) for n, i in enumerate(copied) if edited[i]])
            if drawn:
                found.append(self._draw(work[: len(drawn)], [rows[i] for i in drawn]))
            if argmax_edited:
                found.append(self._best_token(work[len(drawn) :]))
        ids, best = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        reported = any(row.params.logprobs is not None for row in rows)
        kept = logits if reported else None
        return Draws(kept, rows, plain + copied, ids, HostCopy(ids), HostCopy(best))

    @torch.inference_mode()
    def collect(self, draws: Draws) -> Sampled:
        """Wait for the tokens, and report on those whose requests ask for it."""
        rows = draws.rows
        if not rows:
            return Sampled([], [], [])
        token_ids, invalid = [0] * len(rows), [False] * len(rows)
        found = draws.host_ids.wait().tolist(), draws.host_best.wait().tolist()
        for i, token, best in zip(draws.order, *found, strict=True):
            token_ids[i], invalid[i] = token, not math.isfinite(best)
        reports: list[TokenLogprobs | None] = [None] * len(rows)
        asked = [
            (i, row.params.logprobs)
            for i, row in enumerate(rows)
            if row.params.logprobs is not None and not invalid[i]
        ]
        if asked and draws.logits is not None:
            asking = [i for i, _ in asked]
            chosen = [token_ids[i] for i in asking]
            made = self._logprobs(draws.logits, asking, chosen, [n for _, n in asked])
            for i, report in zip(asking, made, strict=True):
                reports[i] = report
        return Sampled(token_ids, reports, invalid)

    def release(self, uid: int) -> None:
        """Forget what was kept for a request that has ended."""
        self._requests.pop(uid, None)
        self._counts.release(uid)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: Sequence[int], top_n: int
    ) -> list[TokenLogprobs]:
        """Reports for the tokens that do follow in a prompt: ``logits`` [n, V], ``next_ids`` n."""
        return self._logprobs(logits, list(range(len(next_ids))), next_ids, [top_n] * len(next_ids))

    def _request(self, row: SamplingRow) -> _Request:
        kept = self._requests.get(row.uid)
        if kept is None or kept.params is not row.params:
            kept = _Request(row, self._vocab_size)
            self._requests[row.uid] = kept
        return kept

    def _take(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if rows == list(range(len(logits))):
            return logits
        return logits.index_select(0, self._tensor(rows))

    def _copy(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """float32 [len(rows), W] in memory that is used again at every call."""
        if len(rows) > len(self._scratch):
            self._scratch = self._empty_rows(len(rows))
        work = self._scratch[: len(rows)]
        work[:, : self._vocab_size] = self._take(logits, rows)
        return work

    def _empty_rows(self, count: int) -> torch.Tensor:
        shape = (count, padded_width(self._vocab_size))
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=self._device)

    def _edit(self, work: torch.Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
        changes, penalised = [], []
        for place, row in rows:
            edits = self._requests[row.uid].edits
            if edits is None:
                continue
            changes += [(place, change) for change in edits.changes(row.output_ids)]
            if edits.penalised:
                penalised.append((place, row, edits))
        add_changes(work, changes)
        if self._kernels:
            self._counts.apply_penalties(
                work[:, : self._vocab_size],
                [
                    Penalised(place, row.uid, row.params, row.prompt_ids, row.output_ids)
                    for place, row, _ in penalised
                ],
            )
            return
        counted = [
            PenalisedRow(place, row.params, edits.counts(row.prompt_ids, row.output_ids))
            for place, row, edits in penalised
        ]
        apply_penalties(work, counted)

    def _draw(
        self, work: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params = [row.params for row in rows]
        places = [Place(row.seed, row.sample_index, row.position) for row in rows]
        if self._kernels:
            return draw_on_device(work[:, : self._vocab_size], params, places)
        return draw(work, params, self._noise.keys(places), self._noise)

    def _logprobs(
        self,
        logits: torch.Tensor,
        rows: list[int],
        chosen: Sequence[int],
        top_n: Sequence[int],
    ) -> list[TokenLogprobs]:
        reports = []
        on_device = self._kernels and max(top_n) <= TOP_TOKENS
        size = LOGPROB_ROWS_ON_DEVICE if on_device else LOGPROB_ROWS
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            ids = self._tensor(chosen[part])
            if on_device:
                taken = self._take(logits, rows[part])
                reports += token_logprobs_on_device(taken, ids, top_n[part])
                continue
            work = self._copy(logits, rows[part])
            reports += token_logprobs(work, self._vocab_size, ids, top_n[part])
        return reports

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(numbers, np.int64), self._device)


class _Request:
    """What is worked out once per request."""

    __slots__ = ("edits", "greedy", "params")

    def __init__(self, row: SamplingRow, vocab_size: int) -> None:
        self.params = row.params
        # top_k = 1 has one answer, also where equal logits would leave several.
        self.greedy = row.params.temperature <= GREEDY_TEMPERATURE or row.params.top_k == 1
        edits = RequestEdits(row.params, row.eos_ids, row.bad_word_ids, vocab_size)
        self.edits = edits if edits.ever_wanted else None
