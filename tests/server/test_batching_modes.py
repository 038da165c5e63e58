"""Static and dynamic batching on a real server: batches run to their end, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as grpcclient

from tests.server.conftest import StartServer
from tests.server.grpc_talk import is_last, tensors, texts
from tests.server.harness import ServerProcess, wait_for

# Of four at a time the longest runs twelve times as long as the shortest, whose seat stays empty.
LENGTHS = [2, 24, 4, 6] * 3
STATIC = ("batch_size=4", "max_num_seqs=4", "batch_window_ms=20000")


class Stay(NamedTuple):
    """One request's text and its time in the engine, in nanoseconds."""

    text: str
    start: int
    end: int


def all_at_once(server: ServerProcess) -> list[Stay]:
    """Send every request over one stream; in the order of ``LENGTHS``."""
    got: dict[str, list[Any]] = {str(number): [] for number in range(len(LENGTHS))}

    def note(result: Any, error: Any) -> None:
        assert error is None, error
        got[result.get_response().id].append(result)

    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(note)
        for number, length in enumerate(LENGTHS):
            inputs = tensors(
                grpcclient,
                True,
                text_input=f"Story number {number % 4}:",
                max_tokens=length,
                temperature=0.0,
                stream=True,
                return_perf_metrics=True,
            )
            client.async_stream_infer(
                "llm", inputs, request_id=str(number), parameters={"ignore_eos": True}
            )
        wait_for("all answers", lambda: all(r and is_last(r[-1]) for r in got.values()), 120)
        client.stop_stream()
    return [stay(got[str(number)]) for number in range(len(LENGTHS))]


def stay(results: list[Any]) -> Stay:
    def time_of(name: str) -> int:
        times = [array for r in results if (array := r.as_numpy(name)) is not None]
        return int(times[-1].reshape(-1)[0])

    start, end = time_of("first_scheduled_time_ns"), time_of("last_token_time_ns")
    return Stay("".join(texts(results)), start, end)


def batches(stays: list[Stay]) -> list[list[Stay]]:
    """Who was scheduled by the same step, in the order of the steps."""
    return [[s for s in stays if s.start == start] for start in sorted({s.start for s in stays})]


@pytest.mark.parametrize(
    ("batching", "settings", "fits"),
    [
        ("static", STATIC, lambda sizes: sizes == [4, 4, 4]),
        ("dynamic", (), lambda sizes: max(sizes) > 1),
    ],
    ids=["static", "dynamic"],
)
def test_a_batch_runs_to_its_end_before_the_next_one_starts(
    batching: str,
    settings: tuple[str, ...],
    fits: Callable[[list[int]], bool],
    start_server: StartServer,
    server: ServerProcess,
) -> None:
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    other = start_server("--no-greet", "--batching", batching, *arguments)
    stays = all_at_once(other)
    found = batches(stays)
    assert fits([len(batch) for batch in found]), found
    for batch, following in zip(found, found[1:], strict=False):
        # The end is noted a moment after the step; in continuous batching the next would start
        # when the shortest leaves, long before the longest is half done.
        assert following[0].start > batch[0].start + max(s.end - s.start for s in batch) / 2
    assert [s.text for s in stays] == [s.text for s in all_at_once(server)]
