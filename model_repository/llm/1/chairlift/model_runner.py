"""From a StepPlan to sampled tokens: tensors, one forward over all rows, logits, the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .attention import AttentionBackend, StepBatch
from .device_copies import to_device
from .forward import Forward
from .graphs import Capture, DecodeGraphs, GraphShape
from .request import Request, TokenLogprobs
from .sampler import Draws, Sampler, SamplingRow
from .scheduler import Row, StepPlan
from .step_arrays import StepArrays


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


class PendingResult(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """What the step drew, once it is done; raises what went wrong on the device."""


class Runner(Protocol):
    """What the engine needs of a runner: ``launch`` only to be one step ahead."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan) -> PendingResult: ...

    def release(self, request: Request) -> None: ...


class ModelRunner:
    """Runs steps of one model on one device.

    Keeps no request state besides the sampler's and what the last step drew: a step that is
    launched before that is known on the host takes its tokens from there.
    """

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        sampler: Sampler,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._last: Draws | None = None
        self._graphs: DecodeGraphs | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """One forward; the KV cache then holds every scheduled token."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Send the step to the device, without waiting for it."""
        self._backend.copy_blocks(plan.copies)
        drawing = _rows_that_sample(plan)
        scoring = [row for row in plan.prefills if row.request.params.prompt_logprobs is not None]
        arrays = StepArrays.of(plan, self._block_size)
        logit_rows = drawing.token_rows + _prompt_rows(plan, scoring)
        logits = self._logits(plan, arrays, logit_rows)
        num_drawing = len(drawing.token_rows)
        self._last = self._sampler.launch(logits[:num_drawing], drawing.rows)
        scored = logits[num_drawing:] if scoring else None
        return PendingStep(self._sampler, drawing.requests, self._last, scoring, scored)

    def release(self, request: Request) -> None:
        """Forget what sampling kept for a finished request."""
        self._sampler.release(request.uid)

    def capture_graphs(self, capture: Capture, shapes: Sequence[GraphShape]) -> None:
        """Run decode steps that fit one of ``shapes`` as graphs from now on."""
        self._graphs = DecodeGraphs(
            self._forward, self._backend, shapes, self._block_size, self._device
        )
        self._graphs.capture(capture)

    def _logits(self, plan: StepPlan, arrays: StepArrays, logit_rows: list[int]) -> Tensor:
        """[S, V] for the tokens ``logit_rows`` of the step; a graph computes those of all."""

        def fill_in(input_ids: Tensor) -> None:
            self._fill_in(input_ids, plan, arrays.promised)

        shape = None if self._graphs is None else self._graphs.find(arrays)
        if self._graphs is None or shape is None:
            batch = self._batch(arrays, len(plan.decodes), logit_rows)
            fill_in(batch.input_ids)
            return self._forward(batch)
        logits = self._graphs.run(shape, arrays, fill_in)
        if logit_rows == list(range(len(logits))):
            return logits
        return logits.index_select(0, self._tensor(np.array(logit_rows, dtype=np.int64)))

    # ---------------------------------------------------------------- tensors

    def _batch(self, arrays: StepArrays, num_decodes: int, logit_rows: list[int]) -> StepBatch:
        return StepBatch(
            input_ids=self._tensor(arrays.token_ids),
            positions=self._tensor(arrays.positions),
            slot_mapping=self._tensor(arrays.slots),
            block_tables=self._tensor(arrays.tables),
            query_start=self._tensor(arrays.query_start),
            seq_lens=self._tensor(arrays.seq_lens),
            logit_rows=self._tensor(np.array(logit_rows, dtype=np.int64)),
            num_decodes=num_decodes,
            max_query_len=arrays.max_query_len,
            max_seq_len=arrays.max_seq_len,
            backend=self._backend,
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return to_device(array, self._device)

    def _fill_in(self, input_ids: Tensor, plan: StepPlan, promised: list[int]) -> None:
        """Put what the step before drew where ``input_ids`` [T] waits for it."""
        if not promised:
            return
        assert self._last is not None
        uids = [self._last.rows[row].uid for row in self._last.order]
        place_of = dict(zip(uids, range(len(uids)), strict=True))
        places = np.array([place_of[plan.decodes[row].request.uid] for row in promised])
        drawn = self._last.ids.index_select(0, self._tensor(places))
        input_ids.index_copy_(0, self._tensor(np.array(promised)), drawn)


class PendingStep:
    """A step on its way. What it draws is on the device; ``wait`` brings it to the host."""

    def __init__(
        self,
        sampler: Sampler,
        requests: list[Request],
        draws: Draws,
        scoring: list[Row],
        prompt_logits: Tensor | None,
    ) -> None:
        self._sampler = sampler
        self._requests = requests
        self._draws = draws
        self._scoring = scoring
        self._prompt_logits = prompt_logits

    @torch.inference_mode()
    def wait(self) -> StepResult:
        sampled = self._sampler.collect(self._draws)
        samples = [
            Sample(request, row.sample_index, token_id, logprobs, invalid)
            for request, row, token_id, logprobs, invalid in zip(
                self._requests,
                self._draws.rows,
                sampled.token_ids,
                sampled.logprobs,
                sampled.invalid,
                strict=True,
            )
        ]
        return StepResult(samples, self._score_prompts())

    def _score_prompts(self) -> list[PromptLogprobs]:
        scores: list[PromptLogprobs] = []
        offset = 0
        if self._prompt_logits is None:
            return scores
        for row in self._scoring:
            wanted = row.request.params.prompt_logprobs
            following = _following_prompt_ids(row)
            if wanted is None or not following:
                continue
            part = self._prompt_logits[offset : offset + len(following)]
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
