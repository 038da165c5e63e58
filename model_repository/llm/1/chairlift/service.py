"""Everything behind one model entry but Triton itself: parse, submit, answer, watch, drain."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import assembly, faults, instruments, protocol
from .answers import Answer, ClientRequest, Responder
from .calls import GenerateCall, StopCall, WireSettings, styled
from .client_watch import ClientWatch
from .config import EngineConfig
from .engine import State
from .errors import ErrorCode, RequestError
from .housekeeping import Housekeeping
from .metrics import Sink
from .observations import Observations
from .open_requests import OpenRequests
from .output import OutputThread
from .profiling import StepProfiler
from .prompts import PreparedPrompt, PromptProcessor
from .request import Request
from .step_outputs import ErrorOut, StepStats
from .tensors import Array
from .token_pieces import TokenPieces
from .trace import TraceOrders, TraceRecorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it came: tensors, request parameters, and the way back.

    ``timeout_us`` is Triton's request timeout, 0 for none.
    """

    inputs: Mapping[str, Array]
    parameters: Mapping[str, str | int | float | bool]
    request_id: str
    timeout_us: int
    requested: Collection[str]
    responder: Responder


# Where the model runs on the same cores as the sends (see OutputThread). With 32 streams on two
# cores workload B took 1.9 s with no limit, 1.5 s with 0.1, when the engine alone took 1.5 s.
CPU_SEND_SHARE = 0.15
# And of asking Triton who has gone: 64 streams asked every 50 ms were 1,280 round trips a second.
CPU_ASKING_SHARE = 0.02
ASKING_SHARE = 0.25


class Service:
    """Owns the engine, the output thread, and housekeeping, and joins them to arrivals."""

    def __init__(
        self,
        config: EngineConfig,
        wire: WireSettings,
        *,
        sink: Sink | None = None,
        labels: Mapping[str, str] | None = None,
        control_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._wire = wire
        self._clock = clock
        self._epoch_offset = time.time() - clock()
        self._uids = itertools.count(0, wire.limits.samples)
        self._batch_ids = itertools.count(1)
        self._rng = random.Random(config.seed)
        self._open = OpenRequests()
        self._observed = Observations(clock)
        self._profiler = StepProfiler(
            control_dir, Path(config.profile_dir) if config.profile_dir else None
        )
        self._trace = TraceRecorder(config.trace_steps, enabled=config.trace)
        self._output = OutputThread(clock, self._observed, self._open.remove)
        self.parts = assembly.build(
            config,
            self._output.put,
            clock,
            on_step=self._on_step,
            wrap_runner=lambda runner: self._profiler.wrap(faults.injected(runner, control_dir)),
        )
        loaded = self.parts.loaded
        self.engine = self.parts.engine
        self._pieces = TokenPieces(loaded.tokenizer)
        self._prompts = PromptProcessor(
            loaded.tokenizer,
            loaded.chat_template,
            max_model_len=self.parts.max_model_len,
            vocab_size=loaded.vocab_size,
            add_special_tokens=config.add_special_tokens,
        )
        self._telemetry = instruments.make_telemetry(
            config, self.parts, self._open, self._observed, clock, sink, labels or {}
        )
        share = CPU_ASKING_SHARE if self._on_cpu else ASKING_SHARE
        asking_s = share * config.cancellation_check_period_ms / 1000
        self._housekeeping = Housekeeping(
            config,
            self.engine,
            self._open,
            clock,
            control_dir,
            clients=ClientWatch(self._open, self.engine, clock, asking_s),
            telemetry=self._telemetry,
            profiler=self._profiler,
            trace=TraceOrders(self._trace, control_dir),
        )

    def start(self) -> None:
        share = self.config.max_send_share or (CPU_SEND_SHARE if self._on_cpu else 1.0)
        self._output.start(self.engine, share)
        self.engine.start()
        self._housekeeping.start()

    def close(self) -> None:
        """End what is open, then join the threads."""
        self._housekeeping.stop()
        self.engine.stop()
        self._output.stop()
        self._telemetry.flush()

    @property
    def _on_cpu(self) -> bool:
        return self.parts.loaded.device.type == "cpu"

    @property
    def ready(self) -> bool:
        return self.engine.state is State.SERVING

    def take(self, arrivals: Sequence[Arrival]) -> None:
        """Submit one batch of Triton's. Blocks to push back: in dynamic batching until it is done,
        so that Triton forms the next one of all that came meanwhile, else while the waiting room
        is full."""
        if self.config.batching == "dynamic":
            self._submit(arrivals)
            self.engine.wait_until_idle()
            return
        if self.config.when_full == "block":
            self.engine.wait_for_room()
        for arrival in arrivals:
            self._submit([arrival])

    def refuse(self, responder: Responder, error: RequestError) -> None:
        """The one response to a request that is not admitted."""
        self._observed.on_refused(error.code)
        responder.fail(error, final=True)

    def _submit(self, arrivals: Sequence[Arrival]) -> None:
        batch_id = next(self._batch_ids)
        requests: list[Request] = []
        for arrival in arrivals:
            try:
                requests += self._admit(arrival, batch_id)
            except RequestError as error:
                self.refuse(arrival.responder, error)
            except Exception as error:
                logger.exception("request %r could not be read", arrival.request_id)
                internal = RequestError(f"internal error: {error}", ErrorCode.INTERNAL)
                wire = protocol.wire_of(arrival.inputs, arrival.parameters, self._wire)
                self.refuse(arrival.responder, styled(internal, wire.error_style))
        if not requests:
            return
        try:
            self.engine.submit(requests)
        except RequestError as error:
            self._output.put([ErrorOut(r.group, error.code, error.message) for r in requests])

    def _admit(self, arrival: Arrival, batch_id: int) -> list[Request]:
        """Parse, tokenize, and check one arrival; its answers are open when this returns."""
        now = self._clock()
        parsed = protocol.parse(
            arrival.inputs, arrival.parameters, arrival.request_id, self._wire, arrival.requested
        )
        if isinstance(parsed, StopCall):
            self._stop_running(parsed.request_id, arrival.responder)
            return []
        timeout_us = arrival.timeout_us or _timeout_parameter(arrival.parameters)
        deadline = now + timeout_us / 1e6 if timeout_us else None
        client = ClientRequest(arrival.responder, arrival.request_id, deadline, asked_at=now)
        made = [self._make(call, client, now, batch_id) for call in parsed]
        for _, request in made:
            client.groups.append(request.group)
            client.open_rows += 1
        self._open.add(client)
        for answer, _ in made:
            self._output.open(answer)
        return [request for _, request in made]

    def _make(
        self, call: GenerateCall, client: ClientRequest, now: float, batch_id: int
    ) -> tuple[Answer, Request]:
        try:
            if self.config.when_full == "refuse":
                self.engine.check_room()
            if not 0 <= call.priority <= self.config.priority_levels:
                raise RequestError(
                    f"llm_priority is {call.priority}; it goes from 1, the highest, to "
                    f"{self.config.priority_levels}, and 0 is the default"
                )
            prompt = self._prompts.prepare(call)
            request = self._request(call, prompt, now, batch_id)
            self.engine.check_fits(request)
        except RequestError as error:
            raise call.error(error) from None
        answer = Answer(
            client,
            call,
            request,
            self._pieces,
            self._wire,
            prompt.text,
            self._to_ns,
            self.config.block_size,
        )
        return answer, request

    def _request(
        self, call: GenerateCall, prompt: PreparedPrompt, now: float, batch_id: int
    ) -> Request:
        params = prompt.params
        return Request(
            uid=next(self._uids),
            prompt_ids=list(prompt.token_ids),
            params=params,
            seed=params.seed if params.seed is not None else self._rng.getrandbits(63),
            arrival=now,
            eos_ids=self.parts.loaded.eos_ids,
            bad_word_ids=prompt.bad_word_ids,
            priority=call.priority,
            tenant=call.tenant,
            deadline=None if call.deadline_ms is None else now + call.deadline_ms / 1000,
            cache_salt=call.cache_salt,
            batch_id=batch_id,
        )

    def _stop_running(self, request_id: str, responder: Responder) -> None:
        """TensorRT-LLM's stop message: end the request of the same id; its own answer is empty."""
        for client in self._open.by_request_id(request_id):
            for group in client.groups:
                self.engine.abort(group, RequestError("Request was cancelled", ErrorCode.CANCELLED))
        responder.send({}, final=True)

    def _on_step(self, stats: StepStats) -> None:
        self._observed.on_step(stats)
        self._profiler.on_step(stats)
        self._trace.record(stats)

    def _to_ns(self, seconds: float) -> int:
        return int((seconds + self._epoch_offset) * 1e9)


def _timeout_parameter(parameters: Mapping[str, object]) -> int:
    """The timeout of /generate, which reaches the model as a plain parameter."""
    timeout = parameters.get("timeout", 0)
    if not isinstance(timeout, int) or timeout < 0:
        raise RequestError(f"timeout {timeout!r} is not a whole number of microseconds")
    return timeout
