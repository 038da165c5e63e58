"""CUDA graphs for decode steps: one launch replays the whole model up to its logits.

A graph repeats the same kernels on the same memory, so a decode step is padded to the next shape of
a small table and its numbers are copied into static buffers. A padding row has sequence length 0,
slot -1 and a table of null blocks: it writes nothing and attends to nothing. The launch grid of
split attention follows from ``max_seq_len``, so that is a part of the shape too. Prompts, and what
fits no shape, run as ever. Sampling is outside: what it launches depends on the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .attention import AttentionBackend, StepBatch
from .device_copies import copy_into
from .step_arrays import StepArrays

logger = logging.getLogger(__name__)

# Row counts double: at most half of a step's rows are padding, in a step that reads the weights
# once whatever the rows. Lengths: a graph for 128 k keys launches 256 programs per row and KV head,
# nearly all of them empty where a row holds 1 k keys; 4 k takes 8.
LENGTHS = (4096, 32_768)
NO_SLOT = -1


class GraphShape(NamedTuple):
    """Steps of up to ``rows`` rows of up to ``max_seq_len`` keys."""

    rows: int
    max_seq_len: int


class CapturedCall(Protocol):
    """A call that can be repeated; ``output`` holds what the last ``replay`` computed."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None: ...


Forward = Callable[[StepBatch], Tensor]
Capture = Callable[[Callable[[], Tensor]], CapturedCall]


def graph_shapes(max_num_seqs: int, max_model_len: int) -> list[GraphShape]:
    """Largest first, so that the smaller ones find their memory in the pool already."""
    rows = sorted({min(1 << power, max_num_seqs) for power in range(max_num_seqs.bit_length() + 1)})
    lengths = [*(length for length in LENGTHS if length < max_model_len), max_model_len]
    return [GraphShape(r, n) for r in reversed(rows) for n in reversed(lengths)]


class Buffers:
    """The static tensors that all graphs read, as large as the largest shape."""

    def __init__(self, shapes: Sequence[GraphShape], block_size: int, device: torch.device) -> None:
        self._rows = max(shape.rows for shape in shapes)
        self._block_size = block_size
        width = self.width(max(shapes, key=lambda shape: shape.max_seq_len))
        # Token ids, positions, slots: one copy for the three.
        self._per_token = torch.zeros(3, self._rows, dtype=torch.int64, device=device)
        self._per_token[2] = NO_SLOT
        self._seq_lens = torch.zeros(self._rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(self._rows * width, dtype=torch.int32, device=device)
        self._query_start = torch.arange(self._rows + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(self._rows, device=device)

    def width(self, shape: GraphShape) -> int:
        """Blocks of a row's table."""
        return -(-shape.max_seq_len // self._block_size)

    def batch(self, shape: GraphShape, backend: AttentionBackend) -> StepBatch:
        """The part of the buffers that a step of ``shape`` reads."""
        rows, width = shape.rows, self.width(shape)
        token_ids, positions, slots = self._per_token
        return StepBatch(
            input_ids=token_ids[:rows],
            positions=positions[:rows],
            slot_mapping=slots[:rows],
            block_tables=self._tables[: rows * width].view(rows, width),
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            logit_rows=self._logit_rows[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=shape.max_seq_len,
            backend=backend,
        )

    def fill(self, shape: GraphShape, arrays: StepArrays) -> None:
        """Copy a step's numbers in, and padding behind them."""
        count, width = len(arrays.token_ids), self.width(shape)
        per_token = np.zeros((3, self._rows), dtype=np.int64)
        per_token[2] = NO_SLOT
        per_token[:, :count] = arrays.token_ids, arrays.positions, arrays.slots
        seq_lens = np.zeros(self._rows, dtype=np.int32)
        seq_lens[:count] = arrays.seq_lens
        held = arrays.tables[:, :width]
        tables = np.zeros((shape.rows, width), dtype=np.int32)
        tables[:count, : held.shape[1]] = held
        copy_into(self._per_token, per_token)
        copy_into(self._seq_lens, seq_lens)
        copy_into(self._tables[: shape.rows * width], tables.reshape(-1))


class DecodeGraphs:
    """The captured decode steps of one model."""

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        shapes: Sequence[GraphShape],
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._shapes = list(shapes)
        self._buffers = Buffers(shapes, block_size, device)
        self._captured: dict[GraphShape, CapturedCall] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every shape, in order; a model that can't be captured runs without graphs."""
        for shape in self._shapes:
            batch = self._buffers.batch(shape, self._backend)
            try:
                self._captured[shape] = capture(partial(self._forward, batch))
            except Exception as error:
                self._captured.clear()
                logger.warning(
                    "decode steps run without CUDA graphs: capturing %s failed: %s", shape, error
                )
                return
        logger.info("CUDA graphs: %d decode shapes captured", len(self._captured))

    def find(self, arrays: StepArrays) -> GraphShape | None:
        """The smallest captured shape for a step; None where it must run as it is."""
        if arrays.max_query_len != 1:
            return None
        rows, keys = len(arrays.token_ids), arrays.max_seq_len
        fitting = [s for s in self._captured if s.rows >= rows and s.max_seq_len >= keys]
        return min(fitting, default=None)

    def run(
        self, shape: GraphShape, arrays: StepArrays, fill_in: Callable[[Tensor], None]
    ) -> Tensor:
        """Logits of the step's rows; the next step overwrites them.

        ``fill_in`` puts the tokens that the host doesn't know into the ids [rows].
        """
        self._buffers.fill(shape, arrays)
        fill_in(self._buffers.batch(shape, self._backend).input_ids)
        captured = self._captured[shape]
        captured.replay()
        return captured.output[: len(arrays.token_ids)]


class CudaCapture:
    """Captures into one memory pool, on a stream of its own.

    The graphs share the pool because no two of them run at once and nobody keeps their logits
    beyond the next step. Only this thread's calls are watched: other threads may use the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], Tensor]) -> CapturedCall:
        """One call as warm-up, because compiling and the libraries' set-up can't be captured.

        A model that waits for the device is found there: a capture that breaks off says less, and
        leaves the allocator in a state of its own.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _refusing_to_wait():
            call()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # torch leaves its stream the current one where a capture breaks off.
        with torch.cuda.stream(current), capture:
            output = call()
        return CudaGraph(graph, output)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Operators that torch knows to wait for the device raise ``RuntimeError`` inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CudaGraph(NamedTuple):
    """A graph and the tensor that it writes its result to."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()
