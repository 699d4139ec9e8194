"""What the adapter remembers between vLLM's calls: requests, their jobs, and the rows that a job names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vllm.v1.kv_offload.base import ReqContext as VllmContext

from kvoffload.errors import UsageError
from kvoffload.integrations.vllm_recency import RequestUses, UsesContext
from kvoffload.keys import OffloadKey
from kvoffload.manager.specs import CPULoadStoreSpec, LoadStoreSpec


class HostBlocks(CPULoadStoreSpec):
    """Rows of host memory for one job, as the worker receives them.

    Attributes:
        req_id: Request that the job belongs to; the worker names it when a load failed.
    """

    req_id: str

    @classmethod
    def of(cls, spec: LoadStoreSpec, req_id: str) -> HostBlocks:
        """Return the same rows for a request."""
        if not isinstance(spec, CPULoadStoreSpec):
            raise UsageError(f"not blocks of host memory: {spec!r}")
        blocks = cls.of_blocks(spec.block_ids, spec.ticket)
        blocks.req_id = req_id
        return blocks


class Job(NamedTuple):
    """One reservation: its ticket, and its keys in the manager's order."""

    ticket: int
    keys: list[OffloadKey]
    is_store: bool


class RequestState:
    """What the adapter knows of one vLLM request; kept in vLLM's own request context."""

    __slots__ = ("announced", "context", "generation", "last_miss", "loads", "pending_since", "stores")

    def __init__(self, context: UsesContext, generation: int) -> None:
        self.context = context
        self._start(generation)

    def restart(self, generation: int) -> None:
        """Forget what was done with a cache that is no more."""
        self.context.uses = RequestUses()
        self._start(generation)

    def _start(self, generation: int) -> None:
        self.generation = generation
        self.announced = False
        self.stores: list[Job] = []
        self.loads: list[Job] = []
        self.pending_since: float | None = None
        self.last_miss: OffloadKey | None = None


def request_context(req_context: VllmContext) -> UsesContext:
    """Return kvoffload's context; `kv_transfer_params={"kvoffload": {"priority": 1, "store": false}}` is understood."""
    params = req_context.kv_transfer_params
    ours = (params or {}).get("kvoffload")
    context = UsesContext(req_context.req_id, params)
    if isinstance(ours, Mapping):
        if isinstance(ours.get("priority"), int):
            context.priority = int(ours["priority"])
        if isinstance(ours.get("store"), bool):
            context.store = bool(ours["store"])
    return context
