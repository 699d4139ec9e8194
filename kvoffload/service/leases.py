"""Leases: a ready prefix, pinned until its owner leaves or its time is up."""

from __future__ import annotations

from collections import OrderedDict

from kvoffload.service.core import Core, LeaseState, RequestState
from kvoffload.service.results import PrefixMatch
from kvoffload.transfer.base import JobId


class LeaseDesk:
    """Pins prefixes and unpins them when their owner leaves, is aborted, or overstays."""

    def __init__(self, core: Core, lease_seconds: float) -> None:
        self._core = core
        self._lease_seconds = lease_seconds
        self._open: OrderedDict[JobId, LeaseState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def by_owner(self) -> dict[str, int]:
        """Return pinned offloaded blocks per request id."""
        owners: dict[str, int] = {}
        for lease in self._open.values():
            owner = lease.request.context.req_id or ""
            owners[owner] = owners.get(owner, 0) + len(lease.keys)
        return owners

    def open(self, request: RequestState, match: PrefixMatch) -> LeaseState:
        """Pin the ready prefix that `match` names; nothing for a request that is over."""
        core = self._core
        per_group = [request.chain.keys(group_idx) for group_idx in range(len(core.geometry.groups))]
        keys = [] if request.over else core.geometry.keys(per_group, 0, match.ready_tokens)
        source = core.manager.prepare_load(keys, request.context) if keys else None
        if source is None:
            keys, match = [], PrefixMatch(0, 0, 0)
        ticket = source.ticket if source is not None else None
        expires = core.clock() + self._lease_seconds
        lease = LeaseState(core.new_id(), request, match, keys, ticket, core.generation, expires)
        if request.over:
            lease.ended = "aborted" if request.aborted else "left"
            return lease
        self._open[lease.id] = request.leases[lease.id] = lease
        return lease

    def why_dead(self, lease: LeaseState) -> str | None:
        """Return why the lease pins nothing any more; None while it holds."""
        if lease.ended is None and lease.generation != self._core.generation:
            return "reset"
        return lease.ended

    def close(self, lease: LeaseState, reason: str) -> None:
        """Unpin; idempotent."""
        if lease.ended is not None:
            return
        lease.ended = reason
        self._open.pop(lease.id, None)
        lease.request.leases.pop(lease.id, None)
        if lease.ticket is not None:
            self._core.manager.complete_load(lease.keys, lease.request.context, ticket=lease.ticket)
            self._core.flush_events()

    def close_all_of(self, request: RequestState, reason: str) -> None:
        """Unpin every lease of one request."""
        for lease in list(request.leases.values()):
            self.close(lease, reason)

    def expire(self) -> None:
        """Unpin leases that overstayed."""
        now = self._core.clock()
        while self._open:
            lease = next(iter(self._open.values()))
            if lease.expires_seconds > now:
                return
            self._core.metrics.count("expired_leases")
            self.close(lease, "expired")

    def next_deadline(self) -> float | None:
        """Return when the next lease expires."""
        return next(iter(self._open.values())).expires_seconds if self._open else None
