"""After a step: append drawn tokens, fork, finish, and say what came out."""

from __future__ import annotations

import logging

from .errors import ErrorCode
from .model_runner import Runner, Sample, StepResult
from .request import FinishReason, Request, Status
from .scheduler import Scheduler, StepPlan
from .step_outputs import ErrorOut, Outputs, PromptOut, TokenOut

logger = logging.getLogger(__name__)


class Collector:
    """Keeps ``groups``: the open sequences of each client's request, by the request's group id."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.groups: dict[int, list[Request]] = {}
        self._scheduler = scheduler
        self._runner = runner

    def collect(self, plan: StepPlan, result: StepResult) -> Outputs:
        """Append drawn tokens, fork, finish; blocks of whoever is done are free at once."""
        outputs: Outputs = []
        scores = {id(score.request): score.tokens for score in result.prompt_logprobs}
        for row in plan.prefills:
            request = row.request
            if request.status is Status.FINISHED:  # aborted while the step ran
                continue
            outputs.append(
                PromptOut(
                    request.group,
                    request.num_cached,
                    request.first_scheduled or 0.0,
                    scores.get(id(request), []),
                )
            )
        finished: dict[int, Request] = {}
        for sample in result.samples:
            self._take_sample(sample, outputs, finished)
        if finished:
            self._scheduler.finish_running(finished.keys())
            for request in finished.values():  # now: forks of a finished parent join its group
                self.leave(request)
        return outputs

    def _take_sample(self, sample: Sample, outputs: Outputs, finished: dict[int, Request]) -> None:
        request = sample.request
        if sample.sample_index != request.sample_index:
            request = self._child(request, sample.sample_index)
        if request.status is Status.FINISHED:
            return
        if sample.invalid:
            message = "the model produced invalid logits (NaN); the request was ended"
            logger.error("request %d: %s", request.group, message)
            outputs.append(ErrorOut(request.group, ErrorCode.INTERNAL, message))
            for member in self.groups.pop(request.group, []):
                self.drop(member)
            return
        request.append_output(sample.token_id)
        ends = sample.token_id in request.params.stop_token_ids or (
            sample.token_id in request.eos_ids and not request.params.ignore_eos
        )
        full = len(request.output_ids) >= request.params.max_tokens
        reason = FinishReason.STOP if ends else FinishReason.LENGTH if full else None
        visible = not ends or request.params.include_stop_str_in_output
        outputs.append(
            TokenOut(
                request.group,
                request.sample_index,
                sample.token_id,
                visible,
                sample.logprobs,
                reason,
            )
        )
        if reason is None:
            if request is not sample.request:
                self._scheduler.fork(sample.request, request)
            return
        finished[request.uid] = request

    def _child(self, parent: Request, sample_index: int) -> Request:
        """Another answer to the same prompt; it takes over after the prompt's last token."""
        child = Request(
            uid=parent.uid + sample_index,
            prompt_ids=parent.prompt_ids,
            params=parent.params,
            seed=parent.seed,
            arrival=parent.arrival,
            eos_ids=parent.eos_ids,
            bad_word_ids=parent.bad_word_ids,
            sample_index=sample_index,
            group=parent.group,
            priority=parent.priority,
            tenant=parent.tenant,
            cache_salt=parent.cache_salt,
            batch_id=parent.batch_id,
        )
        child.first_scheduled, child.num_cached = parent.first_scheduled, parent.num_cached
        members = self.groups.get(parent.group)
        if members is None:
            child.status = Status.FINISHED
        else:
            members.append(child)
        return child

    def leave(self, request: Request) -> None:
        """Forget a sequence that has ended; its group ends with its last."""
        self._runner.release(request)
        members = self.groups.get(request.group)
        if members is not None:
            members.remove(request)
            if not members:
                del self.groups[request.group]

    def drop(self, request: Request) -> None:
        """Take a sequence out of the engine before its end."""
        self._scheduler.finish(request)
        self._runner.release(request)
