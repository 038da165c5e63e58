"""Chairlift's engine alone, in this process: no server and no text, tokens noted as they come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from chairlift_client.timings import Arrival, Trace

from .paths import ENGINE, ROOT
from .workload import WorkRequest

UID_STRIDE = 64


def find_engine_package() -> None:
    """Put the engine's folder on the path, as Triton's stub does, and the checkout's kernels."""
    for folder in (ENGINE, ROOT / "kernels"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


class OwnEngine:
    """An engine with its thread. Requests of a run are submitted together, as one client would.

    ``settings`` are the engine's own; ``loaded`` shares one model among engines of a process.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        loaded: Any = None,
        on_step: Callable[[Any], None] | None = None,
        after_emit: Callable[[], None] | None = None,
    ) -> None:
        find_engine_package()
        from chairlift.assembly import build
        from chairlift.config import EngineConfig

        self.config = EngineConfig.model_validate(dict(settings))
        self._traces: dict[int, Trace] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.num_cached: dict[int, int] = {}
        self._uids = count(0, UID_STRIDE)
        self._num_open = 0
        self._changed = threading.Condition()
        self._after_emit = after_emit
        self.assembly = build(
            self.config, self._emit, time.monotonic, on_step=on_step, loaded=loaded
        )
        self.assembly.engine.start()

    def close(self) -> None:
        self.assembly.engine.stop()

    def submit(self, requests: Sequence[WorkRequest]) -> list[int]:
        """Hand requests over without waiting; their uids, by which results are kept."""
        from chairlift.request import Request, SamplingParams

        now = time.monotonic()
        made = []
        for request in requests:
            params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            uid = next(self._uids)
            made.append(Request(uid, list(request.prompt_ids), params, seed=0, arrival=now))
            self._traces[uid] = Trace(now, len(request.prompt_ids))
            self.token_ids[uid] = []
        with self._changed:
            self._num_open += len(made)
        self.assembly.engine.submit(made)
        return [request.uid for request in made]

    def wait(self) -> None:
        """Block until everything submitted has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)

    def run(self, requests: Sequence[WorkRequest]) -> list[Trace]:
        """Submit all at once, wait for all, and give up their traces."""
        uids = self.submit(requests)
        self.wait()
        return self.take(uids)

    def take(self, uids: Sequence[int]) -> list[Trace]:
        """The traces of ended requests; RuntimeError where one of them failed."""
        traces = [self._traces.pop(uid) for uid in uids]
        for trace in traces:
            if trace.error is not None:
                raise RuntimeError(trace.error)
        return traces

    def _emit(self, outputs: Sequence[Any]) -> None:
        """In the engine's thread, once per step."""
        from chairlift.step_outputs import ErrorOut, TokenOut

        now, ended = time.monotonic(), 0
        for out in outputs:
            if isinstance(out, TokenOut):
                self._traces[out.group].arrivals.append(Arrival(now, 1))
                self.token_ids[out.group].append(out.token_id)
                ended += out.finish is not None
            elif isinstance(out, ErrorOut):
                self._traces[out.group].error = out.message
                ended += 1
            else:
                self.num_cached[out.group] = out.num_cached
        if self._after_emit is not None:
            self._after_emit()
        if ended:
            with self._changed:
                self._num_open -= ended
                self._changed.notify_all()
