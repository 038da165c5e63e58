"""Can this request still meet its deadline? If not, its client should hear it now."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .errors import ErrorCode, RequestError
from .request import Request, Status

# Weight of the newest step in the averages: half of what they say is from the last 14 steps, so
# they follow the load within a second and one odd step moves them by a twentieth.
NEWEST = 0.05


class Pace:
    """Seconds per prompt token and per step of decoding, averaged over the steps that were run.

    Zero until something was measured, so that nothing is judged by a guess.
    """

    def __init__(self) -> None:
        self.prefill_token_s = 0.0
        self.decode_step_s = 0.0

    def observe(self, seconds: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """A step took ``seconds``; of a mixed one, the decodes' usual time is not the prompt's."""
        if num_prefill_tokens:
            reading = max(0.0, seconds - self.decode_step_s) if num_decodes else seconds
            self.prefill_token_s = _blend(self.prefill_token_s, reading / num_prefill_tokens)
        else:
            self.decode_step_s = _blend(self.decode_step_s, seconds)

    def shortest_service(self, request: Request, num_cached: int) -> float:
        """Seconds that ``request`` needs yet if it never waits; ``num_cached`` cost nothing.

        Its unread prompt, and the tokens that it must generate: all ``max_tokens`` where nothing
        can end it sooner, else ``min_tokens``, at least one. Reading a prompt brings the first.
        """
        params = request.params
        must = params.max_tokens if params.ignore_eos and not params.stop else params.min_tokens
        left = max(0, max(1, must) - len(request.output_ids))
        unread = request.num_tokens - request.num_computed - num_cached
        if unread <= 1:
            return left * self.decode_step_s
        return unread * self.prefill_token_s + max(0, left - 1) * self.decode_step_s


def _blend(average: float, newest: float) -> float:
    return newest if average == 0.0 else average + NEWEST * (newest - average)


class Deadlines:
    """Keeps open requests by the last moment at which they could still make it.

    ``find_cached`` says how many tokens of a request that waits are in the prefix cache. A step
    costs O(log n) for those whose moment seems to have come, and nothing for the others.
    """

    def __init__(self, pace: Pace, find_cached: Callable[[Request], int]) -> None:
        self._pace = pace
        self._find_cached = find_cached
        self._latest: list[tuple[float, int, Request]] = []

    def lateness(self, request: Request, now: float, queued_tokens: int = 0) -> float:
        """Seconds by which ``request`` would miss its deadline; 0 where it can meet it.

        ``queued_tokens`` of other prompts are read before it is its turn.
        """
        if request.deadline is None:
            return 0.0
        wait = queued_tokens * self._pace.prefill_token_s
        return max(0.0, now + wait - self._latest_start(request, request.deadline))

    def watch(self, request: Request) -> None:
        """``overdue`` will name it when it cannot meet its deadline any more."""
        if request.deadline is not None:
            latest = self._latest_start(request, request.deadline)
            heapq.heappush(self._latest, (latest, request.uid, request))

    def _latest_start(self, request: Request, deadline: float) -> float:
        cached = 0 if request.num_computed else self._find_cached(request)
        return deadline - self._pace.shortest_service(request, cached)

    def overdue(self, now: float) -> list[Request]:
        """Requests that cannot make it any more, each named once; finished ones are dropped."""
        late: list[Request] = []
        in_time: list[Request] = []
        while self._latest and self._latest[0][0] < now:
            _, _, request = heapq.heappop(self._latest)
            if request.status is not Status.FINISHED:
                (late if self.lateness(request, now) else in_time).append(request)
        for request in in_time:
            self.watch(request)
        return late

    def __len__(self) -> int:
        return len(self._latest)


def too_late(lateness: float) -> RequestError:
    """What the client of such a request is told."""
    return RequestError(
        f"the deadline cannot be met any more: the answer would come {lateness:.2f} s too late or "
        "later",
        ErrorCode.UNAVAILABLE,
    )
