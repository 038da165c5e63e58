"""One step ahead gives the same texts as without, whatever happens while a step is in flight."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chairlift.engine import State
from chairlift.errors import ErrorCode, RequestError
from chairlift.request import SamplingParams
from tests.unit.fake_device import ALPHABET, AheadWorld, Fault, OutOfMemoryError, Text

UID_STRIDE = 8
PLAIN = SamplingParams(max_tokens=20, ignore_eos=True)


@dataclass
class Workload:
    """Requests by the step they arrive at, and which are aborted when."""

    arrivals: dict[int, list[tuple[int, list[int], SamplingParams]]] = field(default_factory=dict)
    aborts: dict[int, int] = field(default_factory=dict)


def make_workload(rng: random.Random, plain: bool = False) -> Workload:
    load = Workload()
    stems = [[rng.randrange(ALPHABET) for _ in range(12)] for _ in range(3)]
    for index in range(25):
        prompt = rng.choice(stems)[: rng.randrange(13)]
        prompt = prompt + [rng.randrange(ALPHABET) for _ in range(rng.randrange(1, 10))]
        special: dict[str, Any] = {} if plain or rng.random() < 0.8 else rng.choice(SPECIAL)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(ALPHABET), k=rng.randrange(3))),
            **special,
        )
        arrival = rng.randrange(40)
        load.arrivals.setdefault(arrival, []).append((index * UID_STRIDE, prompt, params))
        if not plain and rng.random() < 0.2:
            load.aborts[index * UID_STRIDE] = arrival + rng.randrange(15)
    return load


SPECIAL: list[dict[str, Any]] = [
    {"n": 3},
    {"logprobs": 2},
    {"repetition_penalty": 1.5},
    {"min_tokens": 4},
]


def serve(world: AheadWorld, load: Workload, drain_at: int = -1) -> dict[int, Text]:
    """Play a workload to its end, or drain the server in the middle of it."""
    for step in range(60):
        if step == drain_at:
            world.engine.drain(0.05)
            break
        for uid, prompt, params in load.arrivals.get(step, ()):
            world.submit(uid, prompt, params)
        for uid, at in load.aborts.items():
            if at == step:
                world.engine.abort(uid, RequestError("aborted", ErrorCode.CANCELLED))
        world.step()
    world.run()
    for text in world.texts.values():
        text.finals.sort()
    return world.texts


def check_finals(load: Workload, texts: dict[int, Text]) -> None:
    """Each sequence ends once: with a reason, or the whole request with an error."""
    for requests in load.arrivals.values():
        for uid, _, params in requests:
            if uid not in texts:
                continue
            text = texts[uid]
            assert len(set(text.finals)) == len(text.finals)
            assert bool(text.error) or len(text.finals) == params.n
            assert not (text.error and len(text.finals) == params.n)


SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (200, {"max_num_batched_tokens": 64}),
    (24, {"max_num_batched_tokens": 16, "kv_reserve_fraction": 0.0}),
    (16, {"max_num_batched_tokens": 12, "kv_reserve_fraction": 0.0, "max_num_seqs": 6}),
    (24, {"enable_prefix_caching": False, "kv_reserve_fraction": 0.0}),
    (60, {"batching": "static", "batch_size": 4, "batch_window_ms": 50.0}),
]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_texts_are_the_same_both_ways(case: int, seed: int) -> None:
    """End tokens, stop tokens, aborts, forks, penalties, and preemption in tiny pools."""
    num_blocks, settings = SETTINGS[case]
    load = make_workload(random.Random(f"{case} {seed}"))
    sync = serve(AheadWorld(False, num_blocks, **settings), load)
    world = AheadWorld(True, num_blocks, **settings)
    ahead = serve(world, load)
    for uid, text in ahead.items():
        if uid in load.aborts:
            for index, tokens in text.tokens.items():
                other = sync[uid].tokens.get(index, [])
                shorter = min(len(tokens), len(other))
                assert tokens[:shorter] == other[:shorter]
        else:
            assert text == sync[uid]
    check_finals(load, ahead)
    assert world.device.most_in_flight == 2 and world.device.num_promised > 0


def test_the_tiny_pools_do_preempt_and_share() -> None:
    """Or the cases above would prove less than they say."""
    num_preemptions = num_cached = 0
    for case in (1, 2, 3):
        num_blocks, settings = SETTINGS[case]
        world = AheadWorld(True, num_blocks, **settings)
        serve(world, make_workload(random.Random(f"{case} 0")))
        num_preemptions += world.scheduler.num_preemptions
        num_cached += world.kv.num_evictions
    assert num_preemptions > 10 and num_cached > 10


def test_plain_requests_are_always_one_step_ahead() -> None:
    """Every decode after the first takes its token from the device."""
    world = AheadWorld(True, 100)
    for uid in range(4):
        world.submit(uid * UID_STRIDE, [uid, 1, 2], PLAIN)
    world.run()
    assert world.device.num_promised == 4 * 19
    assert world.device.num_launched == 20


def test_an_end_token_costs_one_row_and_its_blocks_come_free_after_it() -> None:
    world = AheadWorld(True, 100)
    probe = AheadWorld(False, 100)
    probe.submit(0, [1, 2, 3], PLAIN)
    probe.run()
    stop = probe.texts[0].tokens[0][9]
    world.submit(0, [1, 2, 3], SamplingParams(max_tokens=40, stop_token_ids=(stop,)), eos_ids=())
    held: list[int] = []
    world.run(lambda: held.append(world.kv.num_used))
    expected = probe.texts[0].tokens[0]
    assert world.texts[0].tokens[0] == expected[: expected.index(stop) + 1]
    assert world.device.num_launched == len(world.texts[0].tokens[0]) + 1
    assert held[-3] > 0 and held[-2:] == [0, 0]


def test_an_abort_while_the_step_runs_is_told_once_and_frees_after_it() -> None:
    world = AheadWorld(True, 100)
    world.submit(0, [1, 2, 3], PLAIN)
    for _ in range(5):
        world.step()
    world.engine.abort(0, RequestError("aborted", ErrorCode.CANCELLED))
    world.engine._take_commands()
    assert world.texts[0].error == "aborted" and world.kv.num_used > 0
    num_tokens = len(world.texts[0].tokens[0])
    world.run()
    assert len(world.texts[0].tokens[0]) == num_tokens


def test_what_others_need_of_a_history_goes_without_a_step_ahead() -> None:
    world = AheadWorld(True, 100)
    world.submit(0, [1, 2, 3], SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True))
    world.submit(UID_STRIDE, [4, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
    world.run()
    assert world.device.num_promised == 9  # of the plain one, once it is alone


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("seed", range(12))
def test_running_out_of_memory_costs_nobody(where: Any, seed: int) -> None:
    rng = random.Random(f"{where} {seed}")
    load = make_workload(rng, plain=True)
    settings = {"max_num_batched_tokens": 32, "kv_reserve_fraction": 0.0}
    sync = serve(AheadWorld(False, 40, **settings), load)
    world = AheadWorld(True, 40, **settings)
    fault = Fault(where, OutOfMemoryError("no memory"))
    world.device.faults = dict.fromkeys(rng.sample(range(8, 30), k=4), fault)
    ahead = serve(world, load)
    assert {uid: t for uid, t in ahead.items() if not t.error} == {
        uid: sync[uid] for uid, t in ahead.items() if not t.error
    }
    assert not any(text.error for text in ahead.values())
    check_finals(load, ahead)


def test_an_answer_is_found_in_the_cache_as_without_a_step_ahead() -> None:
    """A block that a promised token fills can be found once the token is known, not before."""
    cached = []
    for ahead in (False, True):
        world = AheadWorld(ahead, 100)
        params = replace(PLAIN, max_tokens=18)  # the last token computed fills a block
        for uid in (0, UID_STRIDE):  # same prompt, other seeds: blocks differ in their last tokens
            world.submit(uid, [1, 2, 3], params)
        world.run()
        for uid in (0, UID_STRIDE):
            world.submit(uid + 100, [1, 2, 3, *world.texts[uid].tokens[0], 7], PLAIN)
        world.run()
        cached.append([world.texts[uid + 100].num_cached for uid in (0, UID_STRIDE)])
    assert cached[0] == cached[1] == [20, 20]


def test_what_an_aborted_request_leaves_behind_a_failed_step_is_not_found() -> None:
    prompt = list(range(20))
    world = AheadWorld(True, 100)
    world.submit(0, [*prompt, 1], PLAIN)
    world.device.faults = {0: Fault("wait", RuntimeError("boom"))}
    world.step()
    world.engine.abort(0)
    world.run()
    world.submit(UID_STRIDE, [*prompt, 2], PLAIN)
    world.run()
    assert world.texts[UID_STRIDE].num_cached == 0
    assert world.texts[UID_STRIDE].finals == ["0 length"]


@pytest.mark.parametrize("drain_at", range(5, 45, 4))
def test_draining_ends_everybody_once(drain_at: int) -> None:
    load = make_workload(random.Random(drain_at))
    sync = serve(AheadWorld(False, 60), load, 60)
    world = AheadWorld(True, 60)
    ahead = serve(world, load, drain_at)
    for _ in range(10):
        world.step()
    assert world.engine.state is State.DRAINED
    for uid, text in ahead.items():
        assert text.error or uid in load.aborts or text == sync[uid]
    check_finals(load, ahead)


@pytest.mark.parametrize("where", ["launch", "wait", "nan"])
@pytest.mark.parametrize("seed", range(12))
def test_a_failed_step_ends_its_requests_once_and_spares_the_others(where: Any, seed: int) -> None:
    rng = random.Random(f"{where} {seed}")
    load = make_workload(rng, plain=True)
    # Aborts around the fault: what an aborted one leaves in the cache must not be found.
    load.aborts = {index * UID_STRIDE: rng.randrange(10, 25) for index in range(0, 25, 4)}
    sync = serve(AheadWorld(False, 60), load)
    world = AheadWorld(True, 60)
    fault = Fault(where, RuntimeError("boom"))
    world.device.faults = dict.fromkeys(rng.sample(range(5, 25), k=3), fault)
    ahead = serve(world, load)
    for uid, text in ahead.items():
        if not text.error:
            assert text == sync[uid]
    assert any("boom" in t.error or "NaN" in t.error for t in ahead.values())
    check_finals(load, ahead)


def test_three_failures_in_a_row_make_it_unhealthy() -> None:
    world = AheadWorld(True, 60)
    world.device.faults = dict.fromkeys(range(10), Fault("wait", RuntimeError("boom")))
    for uid in range(3):
        assert world.engine.state is State.SERVING
        world.submit(uid * UID_STRIDE, [uid, uid], PLAIN)
        world.step()
        world.step()
    assert world.engine.state is State.UNHEALTHY
    assert all("boom" in text.error for text in world.texts.values())


def test_the_thread_stops_with_a_step_in_flight() -> None:
    world = AheadWorld(True, 60)
    world.engine.start()
    world.submit(0, [1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    world.engine.stop()
    assert world.texts[0].error == "the server is shutting down"
    assert world.kv.num_used == 0
    world.kv.check_integrity([])
