"""Memory-based admission: who boards only if everybody will still fit when the batch is largest."""

from __future__ import annotations

from collections.abc import Sequence

from .forecast import Forecast, num_forks_due
from .kv_cache import KVCacheManager, PrefixHit
from .request import Request, Status


class Admission:
    """Keeps account of what the running requests may need; says who else fits.

    While all of them fit with all of their tokens, that is one addition. Only when memory is short
    is a forecast made, once per step. It expects ``reserve_fraction`` of its ``max_tokens`` from a
    request; below 1 memory is overcommitted, and preemption is the net.
    """

    def __init__(self, kv: KVCacheManager, reserve_fraction: float) -> None:
        self._kv = kv
        self._reserve_fraction = reserve_fraction
        self._worst_case_blocks = 0
        self._forking: list[Request] = []
        self._forecasts: dict[float, Forecast] = {}

    def start_step(self) -> None:
        """Everybody has moved on by a token: what was forecast is old."""
        self._forecasts.clear()

    def boarded(self, request: Request, hit: PrefixHit) -> None:
        for forecast in self._forecasts.values():
            forecast.add(request, hit)
        if num_forks_due(request):
            self._forking.append(request)

    def seated(self, request: Request) -> None:
        self._worst_case_blocks += self._kv.blocks_for(request.max_total_tokens)

    def left(self, request: Request) -> None:
        self._worst_case_blocks -= self._kv.blocks_for(request.max_total_tokens)

    def seats_for(self, candidate: Request) -> int:
        """Seats for ``candidate``, for who will fork from it, and for other forks still to come."""
        self._forking = [
            r for r in self._forking if r.status is Status.RUNNING and num_forks_due(r)
        ]
        return 1 + sum(num_forks_due(request) for request in [*self._forking, candidate])

    def will_fit(self, running: Sequence[Request], candidate: Request, hit: PrefixHit) -> bool:
        """Whether memory lasts until everybody has finished, as far as can be told.

        One who was preempted comes back only where it is certain to stay, or it would be thrown out
        again: then everybody counts with all of its ``max_tokens``.
        """
        if not running or self._worst_case_with(candidate) <= self._kv.num_usable:
            return True
        reserve = 1.0 if candidate.num_preemptions else self._reserve_fraction
        if reserve not in self._forecasts:
            self._forecasts[reserve] = Forecast(self._kv, running, reserve)
        return self._forecasts[reserve].peak_with(candidate, hit) <= self._kv.num_usable

    def _worst_case_with(self, candidate: Request) -> int:
        """Blocks if all were as long as they can become at once, and nobody shared."""
        blocks_for = self._kv.blocks_for
        forks = sum(
            blocks_for(request.max_total_tokens) * num_forks_due(request)
            for request in [*self._forking, candidate]
        )
        return self._worst_case_blocks + blocks_for(candidate.max_total_tokens) + forks
