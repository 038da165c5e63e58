"""From a StepPlan to sampled tokens: tensors, one forward over all rows, logits, the sampler."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .attention import AttentionBackend, StepBatch
from .request import Request, TokenLogprobs
from .sampler import Sampler, SamplingRow
from .scheduler import Row, StepPlan


class Sample(NamedTuple):
    """The token drawn for one sample of ``request``; ``invalid`` where the logits were NaN."""

    request: Request
    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None
    invalid: bool


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt tokens that follow the positions this step computed."""

    request: Request
    tokens: list[TokenLogprobs]


class StepResult(NamedTuple):
    samples: list[Sample]
    prompt_logprobs: list[PromptLogprobs]


class Runner(Protocol):
    """What the engine needs of a runner."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def release(self, request: Request) -> None: ...


class ModelRunner:
    """Runs steps of one model on one device; keeps no request state besides the sampler's."""

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        sampler: Sampler,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._block_size = block_size
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward; the KV cache then holds every scheduled token."""
        self._backend.copy_blocks(plan.copies)
        drawing = _rows_that_sample(plan)
        scoring = [row for row in plan.prefills if row.request.params.prompt_logprobs is not None]
        batch = self._batch(plan, drawing.token_rows + _prompt_rows(plan, scoring))
        logits = self._forward(batch)
        sampled = self._sampler.sample(logits[: len(drawing.token_rows)], drawing.rows)
        samples = [
            Sample(request, row.sample_index, token_id, logprobs, invalid)
            for request, row, token_id, logprobs, invalid in zip(
                drawing.requests,
                drawing.rows,
                sampled.token_ids,
                sampled.logprobs,
                sampled.invalid,
                strict=True,
            )
        ]
        scores = self._score_prompts(scoring, logits[len(drawing.token_rows) :])
        return StepResult(samples, scores)

    def release(self, request: Request) -> None:
        """Forget what sampling kept for a finished request."""
        self._sampler.release(request.uid)

    def _forward(self, batch: StepBatch) -> Tensor:
        output = self._model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            batch=batch,
        )
        logits: Tensor = output.logits[0]
        return logits

    # ---------------------------------------------------------------- tensors

    def _batch(self, plan: StepPlan, logit_rows: list[int]) -> StepBatch:
        rows = plan.rows
        token_ids = [row.request.token_ids[row.start] for row in plan.decodes]
        for row in plan.prefills:
            token_ids += row.request.token_ids[row.start : row.start + row.num_tokens]
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(token_ids)) - query_start[row_of_token] + starts[row_of_token]
        tables = _block_tables(rows)
        size = self._block_size
        slots = tables[row_of_token, positions // size].astype(np.int64) * size + positions % size
        return StepBatch(
            input_ids=self._tensor(np.array(token_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor((starts + counts).astype(np.int32)),
            logit_rows=self._tensor(np.array(logit_rows, dtype=np.int64)),
            num_decodes=len(plan.decodes),
            max_query_len=int(counts.max()),
            max_seq_len=int((starts + counts).max()),
            backend=self._backend,
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _score_prompts(self, scoring: list[Row], logits: Tensor) -> list[PromptLogprobs]:
        scores = []
        offset = 0
        for row in scoring:
            wanted = row.request.params.prompt_logprobs
            following = _following_prompt_ids(row)
            if wanted is None or not following:
                continue
            part = logits[offset : offset + len(following)]
            scored = self._sampler.prompt_logprobs(part, following, wanted)
            scores.append(PromptLogprobs(row.request, scored))
            offset += len(following)
        return scores


class _Drawing(NamedTuple):
    """Which flattened tokens' logits are sampled, and for whom; n > 1 names a token n times."""

    token_rows: list[int]
    requests: list[Request]
    rows: list[SamplingRow]


def _rows_that_sample(plan: StepPlan) -> _Drawing:
    drawing = _Drawing([], [], [])
    last = -1
    for row in plan.rows:
        last += row.num_tokens
        request = row.request
        if row.start + row.num_tokens < request.num_tokens:
            continue
        forks = request.params.n if not request.output_ids and request.sample_index == 0 else 1
        for extra in range(forks):
            drawing.token_rows.append(last)
            drawing.requests.append(request)
            drawing.rows.append(_sampling_row(request, request.sample_index + extra))
    return drawing


def _sampling_row(request: Request, sample_index: int) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=sample_index,
        position=request.num_tokens,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        uid=request.uid + sample_index - request.sample_index,
        eos_ids=request.eos_ids,
        bad_word_ids=request.bad_word_ids,
    )


def _following_prompt_ids(row: Row) -> list[int]:
    """The prompt tokens that the row's positions predict."""
    end = min(row.start + row.num_tokens + 1, row.request.num_prompt_tokens)
    return row.request.prompt_ids[row.start + 1 : end]


def _prompt_rows(plan: StepPlan, scoring: list[Row]) -> list[int]:
    if not scoring:
        return []
    first = {id(row): 0 for row in scoring}
    offset = len(plan.decodes)
    for row in plan.prefills:
        if id(row) in first:
            first[id(row)] = offset
        offset += row.num_tokens
    return [
        first[id(row)] + index
        for row in scoring
        for index in range(len(_following_prompt_ids(row)))
    ]


def _block_tables(rows: list[Row]) -> np.ndarray[Any, np.dtype[np.int32]]:
    width = max(len(row.request.block_ids) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.request.block_ids)] = row.request.block_ids
    return tables
