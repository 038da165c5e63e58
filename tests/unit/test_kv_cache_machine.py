"""Random histories of the KV manager alone, with the cache's contents as the oracle."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chairlift.kv_cache import KVCacheManager
from chairlift.request import Request, SamplingParams
from tests.unit.fake_cache import ConstantHash, FakeCache

ALPHABET = 2


class KVCacheMachine(RuleBasedStateMachine):
    """Requests begin on what is cached, grow, fork, fail, and go; in a pool of a few blocks."""

    @initialize(
        num_blocks=st.integers(1, 9),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.sampled_from([True, True, True, False]),
        collide=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, collide: bool) -> None:
        self.kv = KVCacheManager(num_blocks + 1, block_size, prefix_caching=caching)
        self.cache = FakeCache(num_blocks + 1, block_size)
        self.token = ConstantHash if collide else int
        self.requests: list[Request] = []
        self.seen: list[list[int]] = [[]]
        self.next_uid = 0

    def _new(self, token_ids: list[int], salt: str) -> Request:
        self.next_uid += 1
        return Request(self.next_uid, token_ids, SamplingParams(), 0, 0.0, cache_salt=salt)

    def _compute(self, request: Request, num_new: int, written: bool = True) -> None:
        """The step that fills what was allocated."""
        self.cache.copy(self.kv.take_copies())
        row = (request, request.num_computed, num_new)
        if written:
            self.cache.write([row])
            request.num_computed += num_new
        else:
            self.cache.spoil([row])
            self.kv.forget(request, request.num_computed)

    @rule(data=st.data(), salt=st.sampled_from(["", "", "a"]), is_written=st.booleans())
    def begin(self, data: st.DataObject, salt: str, is_written: bool) -> None:
        token_ids = data.draw(st.sampled_from(self.seen)) + data.draw(
            st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=7)
        )
        request = self._new([self.token(t) for t in token_ids], salt)
        self.seen.append(request.token_ids)
        hit = self.kv.find_prefix(request)
        cached = len(hit.block_ids) * self.kv.block_size
        assert cached < request.num_tokens, "nothing is left to compute logits from"
        num_new = data.draw(st.integers(1, request.num_tokens - cached))
        free_before = self.kv.num_free
        if not self.kv.allocate(request, num_new, hit):
            assert self.kv.num_free == free_before and not request.block_ids
            assert self.kv.blocks_for(cached + num_new) > free_before or hit.block_ids
            return
        self.requests.append(request)
        request.num_computed = cached
        self._compute(request, num_new, is_written)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), number=st.integers(1, 6), is_written=st.sampled_from([True, True, False]))
    def grow(self, data: st.DataObject, number: int, is_written: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        while request.num_tokens < request.num_computed + number:
            request.append_output(self.token(data.draw(st.integers(0, ALPHABET - 1))))
        if self.kv.allocate(request, number):
            self._compute(request, number, is_written)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), number=st.integers(1, 3))
    def fork(self, data: st.DataObject, number: int) -> None:
        parent = data.draw(st.sampled_from(self.requests))
        for _ in range(number):
            child = self._new(list(parent.token_ids[: parent.num_computed]), parent.cache_salt)
            self.kv.fork(parent, child)
            self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.kv.free(request)

    @invariant()
    def books_and_contents_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self.requests)
        for request in self.requests:
            self.cache.check(request)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for request in self.requests:
                self.kv.free(request)
            self.kv.check_integrity([])
            assert self.kv.num_used == 0


def test_kv_cache_whatever_happens() -> None:
    run_state_machine_as_test(
        KVCacheMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
