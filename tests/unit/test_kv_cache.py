"""The KV manager, case by case; test_kv_cache_machine.py has the random histories."""

from __future__ import annotations

import pytest

from chairlift.kv_cache import BlockCopy, KVCacheManager
from chairlift.request import Request, SamplingParams
from tests.unit.fake_cache import ConstantHash


def new_request(token_ids: list[int], uid: int = 0, salt: str = "") -> Request:
    return Request(uid, list(token_ids), SamplingParams(), seed=0, arrival=0.0, cache_salt=salt)


def compute(kv: KVCacheManager, request: Request) -> int:
    """Allocate and compute all of ``request``; returns how many tokens came from the cache."""
    hit = kv.find_prefix(request)
    cached = len(hit.block_ids) * kv.block_size
    assert kv.allocate(request, request.num_tokens - cached, hit)
    request.num_computed = request.num_tokens
    return cached


def test_blocks_of_a_finished_request_are_found_again() -> None:
    kv = KVCacheManager(9, 4)
    first, second = new_request([1, 2, 3, 4, 5, 6, 7, 8, 9]), new_request([1, 2, 3, 4, 5, 6, 7, 8])
    assert compute(kv, first) == 0
    blocks = list(first.block_ids)
    kv.free(first)
    assert (kv.num_used, kv.num_cached_free, kv.num_free) == (0, 2, 8)
    assert compute(kv, second) == 4, "the last token is always computed"
    assert second.block_ids[0] == blocks[0]
    kv.check_integrity([second])


def test_running_requests_share_and_free_only_their_own() -> None:
    kv = KVCacheManager(9, 4)
    first, second = new_request([1] * 9), new_request([1] * 8 + [2])
    compute(kv, first)
    assert compute(kv, second) == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert kv.num_used == 4
    kv.free(first)
    assert kv.num_used == 3
    assert [kv.num_sharers(block) for block in second.block_ids] == [1, 1, 1]
    kv.check_integrity([second])


def test_two_with_the_same_full_prompt_at_once() -> None:
    """The second shares all but the last block, whose duplicate it fills itself."""
    kv = KVCacheManager(9, 4)
    first, second = new_request([1] * 8, 0), new_request([1] * 8, 1)
    compute(kv, first)
    assert compute(kv, second) == 4
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]
    assert first.prefix_chain == second.prefix_chain
    kv.free(second)
    assert kv.num_cached_free == 0, "a duplicate is not worth keeping"
    kv.free(first)
    assert kv.num_cached_free == 2
    kv.check_integrity([])


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    kv = KVCacheManager(7, 2)
    old, recent = new_request([1, 2, 3, 4, 5], 0), new_request([6, 7, 8, 9, 0], 1)
    for request in (old, recent):
        compute(kv, request)
    old_blocks, recent_blocks = list(old.block_ids), list(recent.block_ids)
    kv.free(old)
    kv.free(recent)
    newcomer = new_request([10] * 9, 2)
    assert kv.allocate(newcomer, 9)
    empty = {old_blocks[2], recent_blocks[2]}
    assert set(newcomer.block_ids[:2]) == empty, "blocks without a prefix are taken first"
    assert newcomer.block_ids[2:] == [old_blocks[1], old_blocks[0], recent_blocks[1]]
    assert kv.num_evictions == 3
    kv.check_integrity([newcomer])


def test_a_hit_on_free_blocks_counts_against_the_free_list() -> None:
    kv = KVCacheManager(5, 2)
    first = new_request([1, 2, 3, 4, 5])
    compute(kv, first)
    kv.free(first)
    other = new_request([9, 9, 9], 1)
    assert kv.allocate(other, 3)  # takes the two empty ones
    again = new_request([1, 2, 3, 4, 5], 2)
    hit = kv.find_prefix(again)
    assert len(hit.block_ids) == 2 and kv.num_free == 2
    assert not kv.allocate(again, 1, hit), "two for the hit and one more, where two are free"
    assert not again.block_ids and kv.num_free == 2
    kv.check_integrity([other])


def test_salts_separate() -> None:
    kv = KVCacheManager(20, 2)
    compute(kv, new_request([1, 2, 3, 4, 5], 0, "alice"))
    assert compute(kv, new_request([1, 2, 3, 4, 5], 1, "bob")) == 0
    assert compute(kv, new_request([1, 2, 3, 4, 5], 2)) == 0
    assert compute(kv, new_request([1, 2, 3, 4, 5], 3, "alice")) == 4


def test_switched_off_nothing_is_found_or_kept() -> None:
    kv = KVCacheManager(20, 2, prefix_caching=False)
    first = new_request([1, 2, 3, 4, 5])
    compute(kv, first)
    assert compute(kv, new_request([1, 2, 3, 4, 5], 1)) == 0
    kv.free(first)
    assert kv.num_cached_free == 0


def test_K2_an_evicted_block_is_not_found_under_its_old_name() -> None:
    kv = KVCacheManager(6, 2)
    victim = new_request([1, 2, 3, 4, 5])
    compute(kv, victim)
    kv.free(victim)
    other = new_request([7] * 10, 1)
    compute(kv, other)
    assert kv.num_evictions == 2
    again = new_request([1, 2, 3, 4, 5], 2)
    assert not kv.find_prefix(again).block_ids
    kv.free(other)
    assert compute(kv, again) == 0
    kv.check_integrity([again])


def test_K4_tokens_are_compared_even_if_every_hash_collides() -> None:
    kv = KVCacheManager(30, 2)
    prompts = [[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [1, 2, 4, 3, 5], [3, 4, 1, 2, 5]]
    requests = [new_request([ConstantHash(t) for t in p], i) for i, p in enumerate(prompts)]
    assert len({hash(tuple(request.token_ids[:2])) for request in requests}) == 1
    assert [compute(kv, request) for request in requests] == [0, 0, 2, 0]
    for request in requests:
        kv.free(request)
    again = [new_request([ConstantHash(t) for t in p], 9 + i) for i, p in enumerate(prompts)]
    assert [compute(kv, request) for request in again] == [4, 4, 4, 4]


def test_forks_share_everything_and_copy_only_the_unfinished_block() -> None:
    kv = KVCacheManager(9, 4)
    parent = new_request([1] * 10, 0)
    children = [new_request([1] * 10, uid) for uid in (1, 2)]
    compute(kv, parent)
    for child in children:
        kv.fork(parent, child)
    assert kv.num_used == 3, "nothing is copied before somebody writes"
    tail = parent.block_ids[2]
    for token, request in enumerate([parent, *children]):
        request.append_output(token)
        assert request.num_computed >= request.num_granted
        assert kv.allocate(request, 1)
        request.num_computed += 1
    copies = kv.take_copies()
    assert copies == [
        BlockCopy(tail, parent.block_ids[2]),
        BlockCopy(tail, children[0].block_ids[2]),
    ]
    assert children[1].block_ids[2] == tail, "the last holder keeps the original"
    assert kv.num_used == 2 + 3 and not kv.take_copies()
    kv.check_integrity([parent, *children])


def test_a_fork_of_full_blocks_copies_nothing() -> None:
    kv = KVCacheManager(9, 4)
    parent, child = new_request([1] * 8, 0), new_request([1] * 8, 1)
    compute(kv, parent)
    kv.fork(parent, child)
    for request in (parent, child):
        request.append_output(request.uid)
        assert kv.allocate(request, 1)
        request.num_computed += 1
    assert not kv.take_copies()
    assert parent.block_ids[:2] == child.block_ids[:2]
    assert parent.block_ids[2] != child.block_ids[2]
    kv.check_integrity([parent, child])


def test_a_fork_without_room_for_its_copy_waits_unharmed() -> None:
    kv = KVCacheManager(3, 4)
    parent, child = new_request([1] * 6, 0), new_request([1] * 6, 1)
    compute(kv, parent)
    kv.fork(parent, child)
    child.append_output(2)
    assert not kv.allocate(child, 1)
    kv.check_integrity([parent, child])
    kv.free(parent)
    assert kv.allocate(child, 1), "the parent has left: its block is the child's now"
    assert not kv.take_copies()
    kv.check_integrity([child])


def test_a_spare_block_does_not_pay_for_a_copy() -> None:
    """What a failed step left to its request can't be the target of somebody's tail."""
    kv = KVCacheManager(5, 4)
    parent, child, other = (new_request([uid] * 6, uid) for uid in range(3))
    compute(kv, parent)
    parent.token_ids += [7] * 4
    assert kv.allocate(parent, 4) and len(parent.block_ids) == 3
    kv.forget(parent, 6)
    kv.fork(parent, child)
    assert kv.allocate(other, 4) and kv.num_free == 0
    assert not kv.allocate(parent, 1)
    kv.check_integrity([parent, child, other])


def test_what_a_failed_step_was_to_fill_is_not_found() -> None:
    kv = KVCacheManager(9, 2)
    first = new_request([1, 2, 3, 4, 5, 6, 7])
    assert kv.allocate(first, 2)
    first.num_computed = 2
    assert kv.allocate(first, 4)
    sharer = new_request([1, 2, 3, 4, 9], 1)
    assert len(kv.find_prefix(sharer).block_ids) == 2, "found before it is computed"
    kv.forget(first, 2)
    assert len(kv.find_prefix(sharer).block_ids) == 1
    kv.check_integrity([first])
    assert kv.allocate(first, 4), "a second try needs no new blocks"
    assert len(first.block_ids) == 3
    assert len(kv.find_prefix(sharer).block_ids) == 2


def test_a_pool_needs_a_null_block_and_another() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        KVCacheManager(1, 16)


@pytest.mark.parametrize("damage", ["leak", "double free", "stale key"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    kv = KVCacheManager(6, 2)
    request = new_request([1, 2, 3])
    compute(kv, request)
    kv.check_integrity([request])
    if damage == "leak":
        request.block_ids.pop()
    elif damage == "double free":
        kv._free_empty.append(request.block_ids[0])
    else:
        kv._keys[request.block_ids[0]] = None
    with pytest.raises(AssertionError):
        kv.check_integrity([request])
