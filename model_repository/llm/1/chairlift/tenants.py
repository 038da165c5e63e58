"""What each tenant has waiting and running, and how much it has been served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ErrorCode, RequestError
from .request import Request

# Tenant names come from clients. Idle accounts are dropped when there are this many, so that
# made-up names cannot fill the memory; those who were served most keep theirs.
MAX_ACCOUNTS = 1000


@dataclass(slots=True)
class Account:
    """``served`` tokens divided by the tenant's weight; only ever grows."""

    weight: float
    served: float = 0.0
    num_waiting: int = 0
    queued_tokens: int = 0
    num_running: int = 0


@dataclass(slots=True)
class Charge:
    """What a running request's tenant has paid for it so far, in tokens."""

    request: Request
    paid: int = 0

    @property
    def due(self) -> int:
        """Output tokens, and what was read of the prompt; recomputed tokens are no service."""
        request = self.request
        if request.sample_index:
            return len(request.output_ids)
        return request.num_prompt_tokens - request.num_cached + len(request.output_ids)


class Tenants:
    """Accounts by tenant name; unknown tenants have weight 1.

    ``max_queued_tokens`` limits prompt and ``max_tokens`` of a tenant's waiting requests together.
    """

    def __init__(self, weights: Mapping[str, float], max_queued_tokens: int | None) -> None:
        self._weights = weights
        self._max_queued_tokens = max_queued_tokens
        self.num_queued_prompt_tokens = 0
        self._accounts: dict[str, Account] = {}
        self._charges: dict[int, Charge] = {}

    def account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._drop_idle()
            account = self._accounts[tenant] = Account(self._weights.get(tenant, 1.0))
        return account

    def enter(self, request: Request) -> None:
        """``request`` waits; raises ``RequestError`` where its tenant has too much waiting already.

        One request is always taken, however long.
        """
        account, limit = self.account(request.tenant), self._max_queued_tokens
        queued = account.queued_tokens + request.max_total_tokens
        if limit is not None and account.num_waiting and queued > limit:
            raise RequestError(
                f"tenant '{request.tenant}' has {account.queued_tokens} tokens waiting; with the "
                f"{request.max_total_tokens} of this request they would exceed "
                f"max_queued_tokens_per_tenant ({limit})",
                ErrorCode.UNAVAILABLE,
            )
        account.num_waiting += 1
        account.queued_tokens = queued
        self.num_queued_prompt_tokens += request.num_prompt_tokens

    def withdraw(self, request: Request) -> None:
        """A request that never ran waits no longer."""
        account = self.account(request.tenant)
        account.num_waiting -= 1
        account.queued_tokens -= request.max_total_tokens
        self.num_queued_prompt_tokens -= request.num_prompt_tokens

    def start(self, request: Request) -> None:
        """``request`` runs for the first time, or has forked off; what it reads is paid for now."""
        self.account(request.tenant).num_running += 1
        charge = self._charges[request.uid] = Charge(request)
        self._collect(charge)

    def leave(self, request: Request) -> None:
        """A request that has started is out."""
        charge = self._charges.pop(request.uid)
        self._collect(charge)
        self.account(request.tenant).num_running -= 1

    def settle(self) -> None:
        """Bring all accounts up to date: outputs are charged when somebody asks, not per token."""
        for charge in self._charges.values():
            self._collect(charge)

    def _collect(self, charge: Charge) -> None:
        due = charge.due
        if due > charge.paid:
            account = self.account(charge.request.tenant)
            account.served += (due - charge.paid) / account.weight
            charge.paid = due

    def _drop_idle(self) -> None:
        idle = [name for name, a in self._accounts.items() if not (a.num_waiting or a.num_running)]
        idle.sort(key=lambda name: self._accounts[name].served)
        for name in idle[: MAX_ACCOUNTS // 2]:
            del self._accounts[name]
