"""What one step did, counted for metrics and the trace."""

from __future__ import annotations

from .scheduler import Scheduler, StepPlan
from .step_ahead import StepTimes
from .step_outputs import StepStats


def step_stats(
    scheduler: Scheduler, plan: StepPlan, times: StepTimes, finished: float
) -> StepStats:
    """``finished`` is now, by the engine's clock."""
    again = sum(row.num_tokens for row in plan.prefills if row.request.num_preemptions)
    return StepStats(
        started=times.started,
        scheduled=times.scheduled,
        finished=finished,
        num_decodes=len(plan.decodes),
        num_prefills=len(plan.prefills),
        num_prefill_tokens=plan.num_tokens - len(plan.decodes),
        num_recomputed_tokens=again,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preempted=len(plan.preempted),
        blocks_used=scheduler.kv.num_used,
        blocks_cached_free=scheduler.kv.num_cached_free,
    )
