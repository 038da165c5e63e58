"""How many tokens one step may compute, and how much of a prompt one chunk reads."""

from __future__ import annotations

from .config import EngineConfig

# After a step that ran out of memory the limit is halved; it is whole again within this many steps,
# so that a limit that lies in between is met rarely.
RECOVERY_STEPS = 128


class StepBudget:
    """The token limit of a step, and the rules for cutting prompts into chunks."""

    def __init__(self, config: EngineConfig, block_size: int) -> None:
        self.limit = config.max_num_batched_tokens
        self._full_limit = self.limit
        self._growth = 0
        self._prefill_cap = config.long_prefill_token_threshold or self.limit
        self._whole_prompts = not config.enable_chunked_prefill
        self._block_size = block_size

    def start_step(self) -> None:
        """Win back, step by step, what ``halve`` took; not in the step right after it."""
        self.limit = min(self._full_limit, self.limit + self._growth)
        self._growth = 1 + self._full_limit // RECOVERY_STEPS

    def halve(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` did not fit into the device's memory."""
        self.limit = max(1, num_tokens // 2)
        self._growth = 0

    def chunk(self, start: int, missing: int, left: int, *, alone: bool, first: bool) -> int:
        """How many of a prompt's ``missing`` tokens, which begin at ``start``, to read now.

        ``left`` tokens of this step are free; 0 means: wait for a step with more room. A chunk ends
        with a full block, except at the prompt's end: an unfinished one could not be shared. Crumbs
        are read only by the step's ``first`` chunk. A request ``alone`` in the engine knows no cap.
        Without chunked prefill only a prompt longer than a whole step is read in pieces.
        """
        capped = not (alone or self._whole_prompts)
        most = min(left, self._prefill_cap) if capped else left
        if missing <= most:
            return missing
        if most <= 0 or (self._whole_prompts and left < self.limit):
            return 0
        whole_blocks = most - (start + most) % self._block_size
        if whole_blocks > 0:
            return whole_blocks
        return most if first else 0
