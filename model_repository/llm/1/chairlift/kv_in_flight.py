"""The KV cache's books while a step is still running: blocks that it writes are not handed out.

With one step ahead two things differ from ``KVCacheManager``. A request that ends while a step in
flight writes to its blocks gives them up only when that step is done. And the last token of a
request may not be known on the host yet: a block that it fills becomes findable when it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from .kv_cache import KVCacheManager
from .request import Request


class InFlightKVCache(KVCacheManager):
    """``KVCacheManager`` for a loop that schedules a step while another one runs."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching)
        self._writing: set[int] = set()
        self._leaving: list[Request] = []

    def launched(self, requests: Iterable[Request]) -> None:
        """A step that writes to the blocks of ``requests`` is on its way, and no other one."""
        self._writing = {request.uid for request in requests}

    def done(self) -> bool:
        """The step is done: who ended meanwhile gives up its blocks. Whether anybody did."""
        self._writing = set()
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            super().free(request)
        return bool(leaving)

    def failed(self) -> bool:
        """``done``, and nothing that those who ended meanwhile held can be found any more."""
        for request in self._leaving:
            self.forget(request, 0)
        return self.done()

    def announce(self, request: Request) -> None:
        """Its last token is known now: the block that it filled can be found."""
        if self.prefix_caching and request.num_computed % self.block_size == 0:
            self._make_findable(request, request.num_computed)

    def free(self, request: Request) -> None:
        """As ever, or when the step in flight is done."""
        if request.uid in self._writing and request.block_ids:
            leaving = Request(request.uid, [], request.params, request.seed, request.arrival)
            leaving.block_ids, request.block_ids = request.block_ids, []
            leaving.prefix_chain, request.prefix_chain = request.prefix_chain, []
            self._leaving.append(leaving)
        super().free(request)

    def _make_findable(self, request: Request, num_tokens: int) -> None:
        super()._make_findable(request, min(num_tokens, len(request.token_ids)))

    def check_integrity(self, requests: Iterable[Request]) -> None:
        super().check_integrity([*requests, *self._leaving])
