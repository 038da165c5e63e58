"""The estimate of the future peak against a simulation of the same future, block by block."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from chairlift.forecast import (
    Forecast,
    expected_remaining,
    num_forks_due,
    usage_at_departures,
)
from chairlift.kv_cache import NO_HIT, KVCacheManager
from chairlift.request import Request, SamplingParams


class Future(NamedTuple):
    held: int
    steps: int


futures = st.lists(
    st.builds(Future, held=st.integers(0, 70), steps=st.integers(1, 60)),
    min_size=1,
    max_size=12,
)


def brute_force_peak(sequences: list[Future], block_size: int) -> int:
    """Everybody takes a token per step and leaves after its last; counts blocks at each step."""
    return max(
        sum(-(-(one.held + step) // block_size) for one in sequences if step <= one.steps)
        for step in range(1, max(one.steps for one in sequences) + 1)
    )


@settings(max_examples=400, deadline=None)
@given(futures, st.sampled_from([1, 2, 4, 16, 64]))
def test_peak_equals_brute_force(sequences: list[Future], block_size: int) -> None:
    longest_first = sorted(sequences, key=lambda one: one.steps, reverse=True)
    held, steps = np.array(longest_first).T
    usage = usage_at_departures(held, steps, np.zeros_like(held), block_size)
    assert usage.max() == brute_force_peak(sequences, block_size)


def new_request(uid: int, token_ids: list[int], max_tokens: int, n: int = 1) -> Request:
    return Request(uid, token_ids, SamplingParams(max_tokens=max_tokens, n=n), seed=0, arrival=uid)


def start(kv: KVCacheManager, request: Request) -> None:
    """Read the prompt and draw the first token."""
    hit = kv.find_prefix(request)
    cached = len(hit.block_ids) * kv.block_size
    assert kv.allocate(request, request.num_tokens - cached, hit)
    request.num_computed = request.num_tokens
    request.append_output(0)


def run_to_the_end(kv: KVCacheManager, requests: list[Request]) -> int:
    """Everybody decodes to its ``max_tokens``; the most blocks that were in use."""
    peak = kv.num_used
    left = list(requests)
    while left:
        for request in left:
            assert kv.allocate(request, request.num_tokens - request.num_computed)
            request.num_computed = request.num_tokens
        peak = max(peak, kv.num_used)
        for request in left:
            request.append_output(request.uid)
        for request in [r for r in left if len(r.output_ids) >= r.params.max_tokens]:
            kv.free(request)
            left.remove(request)
    return peak


shared_prompts = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(2, 30)), min_size=1, max_size=8
)


@settings(max_examples=300, deadline=None)
@given(shared_prompts, st.sampled_from([2, 4, 16]))
def test_estimate_with_shared_prefixes_equals_what_happens(
    shapes: list[tuple[int, int, int]], block_size: int
) -> None:
    """Shared blocks count once and go with their last sharer."""
    kv = KVCacheManager(2_000, block_size)
    requests = []
    for uid, (num_shared_blocks, own, max_tokens) in enumerate(shapes):
        prompt = [0] * (num_shared_blocks * block_size) + [1000 + uid] * own
        requests.append(new_request(uid, prompt, max_tokens))
    *running, candidate = requests
    for request in running:
        start(kv, request)
    hit = kv.find_prefix(candidate)
    estimate = Forecast(kv, running, 1.0).peak_with(candidate, hit)
    assert kv.allocate(candidate, 1, hit)
    candidate.num_computed = len(hit.block_ids) * block_size
    assert estimate == run_to_the_end(kv, requests)


@pytest.mark.parametrize("prompt_length", [5, 8, 9])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("is_running", [False, True])
def test_forks_to_come_count_with_their_own_blocks_only(
    prompt_length: int, n: int, is_running: bool
) -> None:
    """Whether the parent boards now, or is reading its prompt while somebody else boards."""
    kv = KVCacheManager(200, 4)
    parent, other = new_request(0, [1] * prompt_length, 10, n), new_request(99, [2] * 7, 14)
    running, candidate = ([parent], other) if is_running else ([other], parent)
    estimate = Forecast(kv, running, 1.0).peak_with(candidate, NO_HIT)
    start(kv, parent)
    start(kv, other)
    children = [new_request(uid, [1] * prompt_length, 10, n) for uid in range(1, n)]
    for child in children:
        kv.fork(parent, child)
        child.append_output(child.uid)
    assert num_forks_due(parent) == 0
    assert estimate == run_to_the_end(kv, [parent, other, *children])


def test_the_reserved_fraction_scales_what_is_expected() -> None:
    request = new_request(0, [1] * 10, 20)
    assert [expected_remaining(request, f) for f in (0.0, 0.5, 1.0)] == [1, 10, 20]
    for token in range(15):
        request.append_output(token)
    assert [expected_remaining(request, f) for f in (0.0, 0.5, 1.0)] == [1, 1, 5]


@settings(max_examples=200, deadline=None)
@given(shared_prompts, st.sampled_from([2, 4, 16]))
def test_boarding_many_in_one_step_is_never_underestimated(
    shapes: list[tuple[int, int, int]], block_size: int
) -> None:
    """Exact without sharing; what is shared in the same step may count twice."""
    kv = KVCacheManager(2_000, block_size)
    forecast = Forecast(kv, [], 1.0)
    requests = []
    for uid, (num_shared_blocks, own, max_tokens) in enumerate(shapes):
        prompt = [0] * (num_shared_blocks * block_size) + [1000 + uid] * own
        request = new_request(uid, prompt, max_tokens)
        hit = kv.find_prefix(request)
        estimate = forecast.peak_with(request, hit)
        forecast.add(request, hit)
        start(kv, request)
        requests.append(request)
    peak = run_to_the_end(kv, requests)
    assert estimate >= peak
    if not any(num_shared_blocks for num_shared_blocks, _, _ in shapes):
        assert estimate == peak
