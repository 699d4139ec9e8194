"""The requests of an engine: who has begun, who has ended, and the chains of those that ended last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from kvoffload.chain import BlockChain
from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.service.arguments import check_request, check_request_id
from kvoffload.service.core import Core, FirstLook, RequestState

Keys = Sequence[Sequence[OffloadKey]]
"""Per group, the keys of a request."""

RECENT_REQUESTS = 256
RECENT_KEYS = 1 << 17


class Roster:
    """Open requests by id, and the keys of recent ones for `explain` (bounded by requests and by keys)."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[str, RequestState] = {}
        self._recent: OrderedDict[str, Keys] = OrderedDict()
        self._looks: dict[str, tuple[FirstLook, ...]] = {}  # of the recent ones; a pair would be one more object each
        self._recent_keys = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> list[str]:
        """Ids of the open requests."""
        return list(self._open)

    def begin(self, context: ReqContext, chain: BlockChain) -> RequestState:
        """Register a request.

        Raises:
            UsageError: No id, an id in use, or a chain that was not cut for this model.
        """
        check_request(context, chain)
        if context.req_id in self._open:
            raise UsageError(f"request {context.req_id!r} has begun already: finish it first, or use another id")
        groups = self._core.geometry.groups
        if chain.groups != groups:
            raise UsageError(
                f"chain was cut for {chain.groups}, the model has {groups}: make it with "
                "service.chain(...), or with config.group_layouts()"
            )
        if context.started_seconds is None:
            context = replace(context, started_seconds=self._core.clock())
        state = self._open[context.req_id or ""] = RequestState(context, chain, [0] * len(chain.groups))
        return state

    def find(self, request_id: str) -> RequestState | None:
        """Return an open request's state; None for an id that is not open.

        Raises:
            UsageError: It is no id.
        """
        try:
            request = self._open.get(request_id)
        except TypeError:  # a list, say
            request = None
        if request is None:
            check_request_id(request_id)
        return request

    def get(self, request_id: str) -> RequestState:
        """Return an open request's state.

        Raises:
            UsageError: It has not begun or has finished.
        """
        request = self.find(request_id)
        if request is None:
            raise UsageError(f"request {request_id!r} has not begun or has finished: begin it first")
        return request

    def finish(self, request: RequestState) -> None:
        """Forget an open request, and tell the manager how it ended."""
        core = self._core
        request_id = request.context.req_id or ""
        del self._open[request_id]
        request.finished = True
        groups = range(len(core.geometry.groups))
        per_group = tuple(tuple(request.chain.keys(group_idx)) for group_idx in groups)
        outcome = request.outcome or RequestOutcome()
        if outcome.now_seconds is None:
            outcome = replace(outcome, now_seconds=core.clock())
        core.manager.finish_request(request.context, outcome, [key for keys in per_group for key in keys])
        core.flush_events()
        self._remember(request_id, per_group, request.found)

    def _remember(self, request_id: str, per_group: Keys, found: tuple[FirstLook, ...]) -> None:
        recent = self._recent
        self._recent_keys += sum(map(len, per_group)) - sum(map(len, recent.pop(request_id, ())))
        recent[request_id], self._looks[request_id] = per_group, found
        while len(recent) > RECENT_REQUESTS or (self._recent_keys > RECENT_KEYS and len(recent) > 1):
            oldest, dropped = recent.popitem(last=False)
            del self._looks[oldest]
            self._recent_keys -= sum(map(len, dropped))

    def look_back(self, request_id: str) -> tuple[Keys, tuple[FirstLook, ...]]:
        """Return the keys per group of an open or recent request, and what its first look-up found.

        Raises:
            UsageError: It is neither.
        """
        request = self.find(request_id)
        if request is not None:
            groups = range(len(self._core.geometry.groups))
            return [request.chain.keys(group_idx) for group_idx in groups], request.found
        recent = self._recent.get(request_id)
        if recent is None:
            raise UsageError(f"request {request_id!r} is not known: open ones and the last {RECENT_REQUESTS} are")
        return recent, self._looks[request_id]
