"""What bench sends, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chairlift_client.bench_requests import from_file, load_requests, made_up
from chairlift_client.errors import SetupError
from chairlift_client.load import LoadRequest, closed_loop, open_loop, poisson_offsets
from chairlift_client.timings import Trace


def test_made_up_prompts_have_the_length_asked_for_and_share_only_the_prefix() -> None:
    requests = made_up(8, 50, 7, random.Random(1), shared_prefix=20)
    words = [str(request.inputs["text_input"]).split() for request in requests]
    assert [len(each) for each in words] == [50] * 8
    assert len({tuple(each[:20]) for each in words}) == 1
    assert len({tuple(each[20:]) for each in words}) == 8
    assert all(request.inputs["max_tokens"] == 7 for request in requests)


def test_a_seed_gives_the_same_requests_again() -> None:
    def make(seed: int) -> list[LoadRequest]:
        return load_requests(
            None,
            3,
            seed=seed,
            prompt_tokens=9,
            max_tokens=4,
            shared_prefix=0,
            ignore_eos=True,
        )

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert make(1)[0].parameters == {"ignore_eos": True}


def test_files_are_arrays_or_lines_and_keep_other_inputs(tmp_path: Path) -> None:
    entries = [
        {"prompt": "one", "temperature": 0.5},
        {"prompt_token_ids": [1, 2], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hé"}]},
    ]
    array, lines = tmp_path / "a.json", tmp_path / "l.jsonl"
    array.write_text(json.dumps(entries))
    lines.write_text("\n\n".join(json.dumps(entry) for entry in entries) + "\n")
    requests = from_file(array, None, 11)
    assert requests == from_file(lines, None, 11)
    assert requests[0].inputs == {"max_tokens": 11, "text_input": "one", "temperature": 0.5}
    assert requests[1].inputs == {"max_tokens": 3, "input_ids": [1, 2]}
    assert requests[2].inputs["messages"] == '[{"role": "user", "content": "hé"}]'
    assert len(from_file(array, 7, 11)) == 7
    assert from_file(array, 2, 11) == requests[:2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no requests"),
        ("{", "not JSON"),
        ('"text"', "request 1: expected an object"),
        ('{"prompt": "a"}\n{"max_tokens": 3}', "request 2: expected one prompt"),
        ('{"prompt": "a", "messages": []}', "request 1: expected one prompt"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=complaint):
        from_file(path, None, 1)


def test_poisson_arrivals_start_at_once_and_keep_their_rate() -> None:
    offsets = poisson_offsets(4.0, 4001, random.Random(3))
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    assert offsets[-1] / 4000 == pytest.approx(0.25, rel=0.05)


class FakeClient:
    """Ends one request whenever somebody waits, and notes what ran at a time."""

    def __init__(self) -> None:
        self.num_open = 0
        self.largest = 0
        self.sent: list[LoadRequest] = []

    def submit(self, request: LoadRequest) -> Trace:
        self.sent.append(request)
        self.num_open += 1
        self.largest = max(self.largest, self.num_open)
        return Trace(float(len(self.sent)))

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        while not until():
            self.num_open -= 1
        return True


REQUESTS: Sequence[LoadRequest] = [LoadRequest({"text_input": str(n)}) for n in range(10)]


def test_a_closed_loop_never_exceeds_its_concurrency() -> None:
    client = FakeClient()
    traces = closed_loop(client, REQUESTS, 3)  # type: ignore[arg-type]
    assert (len(traces), client.largest, client.num_open) == (10, 3, 0)
    assert client.sent == REQUESTS


def test_an_open_loop_sends_at_its_offsets_whatever_runs() -> None:
    client = FakeClient()
    now = [100.0]
    sent_at: list[float] = []

    def wait(seconds: float) -> None:
        now[0] += seconds
        sent_at.append(now[0])

    offsets = [0.5 * n for n in range(10)]
    open_loop(client, REQUESTS, offsets, lambda: now[0], wait)  # type: ignore[arg-type]
    assert client.largest == 10
    assert sent_at == [100.0 + offset for offset in offsets[1:]]
