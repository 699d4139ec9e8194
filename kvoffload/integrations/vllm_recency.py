"""When a vLLM request counts as a use of its blocks: vLLM never calls `touch`, so requests' boundaries must do.

Theory of operation. `lru` and `arc` get what vLLM's own manager gives them: one use a request, when it finished, with
the head of the prefix newest. A block that the request only stored becomes recent, not frequent; a block that it loaded
or offered while it was held counts as used again. ARC also hears, before a block is stored, that its ghost was asked
for: storing it drops the ghost. Other policies hear of a request as they do under kvoffload's own service: all its keys
once, at its first load or store, and again at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.block_table import BlockTable, Ids
from kvoffload.manager.policies.arc import ARCCachePolicy
from kvoffload.manager.request_book import RequestBook

Position = Callable[[OffloadKey], int | None]

FINISH_POLICIES = ("lru", "arc")
"""Policies whose keys are used when the request finished."""

_REUSED, _STORED, _REFUSED = "reused", "stored", "refused"


class RequestUses:
    """What one request did with its keys: a log, read once when the request finished."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log: list[tuple[str, Sequence[OffloadKey]]] = []

    def reused(self, keys: Sequence[OffloadKey]) -> None:
        """Book keys that were held and are loaded or offered again."""
        self._log.append((_REUSED, keys))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Book keys that got a block."""
        self._log.append((_STORED, keys))

    def refused(self, keys: Sequence[OffloadKey]) -> None:
        """Book keys that found no room."""
        self._log.append((_REFUSED, keys))

    def keys(self, position: Position | None = None, *, one_group: bool = False) -> list[OffloadKey]:
        """Return all keys, each once.

        Args:
            position: End of a key in its request; with it the keys come in prefix order, groups side by side, unless
                the position of one is unknown.
            one_group: All keys are of one group, so that those of one call are in order already.
        """
        log = [keys for _, keys in self._log if keys]
        keys = list(log[0]) if len(log) == 1 else list(dict.fromkeys(chain.from_iterable(log)))
        if position is None or (one_group and _in_order(log, position)):
            return keys
        ends = list(map(position, keys))
        if None in ends or ends == sorted(ends):  # type: ignore[type-var] # no None is left
            return keys
        end_of = dict(zip(keys, ends, strict=True))
        return sorted(sorted(keys, key=_group), key=end_of.__getitem__)  # type: ignore[arg-type] # no None is left

    def classes(self) -> tuple[set[OffloadKey], set[OffloadKey]]:
        """Return the keys that were used again and those that neither were nor got a block."""
        stored: set[OffloadKey] = set()
        reused: set[OffloadKey] = set()
        refused: set[OffloadKey] = set()
        for kind, keys in self._log:
            if kind is _STORED:
                stored.update(keys)
            elif kind is _REFUSED:
                refused.update(keys)
            elif stored:
                reused.update(key for key in keys if key not in stored)
            else:
                reused.update(keys)
        return reused, refused - stored - reused if refused else refused


def _in_order(log: Sequence[Sequence[OffloadKey]], position: Position) -> bool:
    """Whether the calls followed each other in prefix order, none overlapping."""
    last = 0
    for keys in log:
        first, end = position(keys[0]), position(keys[-1])
        if first is None or end is None or first <= last:
            return len(log) == 1
        last = end
    return True


def _group(key: OffloadKey) -> bytes:
    return key[-4:]


def request_keys(keys: Iterable[OffloadKey]) -> Sequence[OffloadKey]:
    """Return a request's keys, given in prefix order, group after group."""
    return sorted(keys, key=_group)


@dataclass(slots=True)
class UsesContext(ReqContext):
    """A request's context that carries its uses to the policy."""

    uses: RequestUses = field(default_factory=RequestUses)
    position: Position | None = None
    one_group: bool = False


class RequestwiseARC(ARCCachePolicy):
    """ARC for vLLM's requests: ghosts teach it when their keys are offered, uses when a request finished.

    Keys of a finished request that were evicted meanwhile were not asked for again: their ghosts teach nothing.
    """

    def bind(self, table: BlockTable) -> None:
        """Start anew on `table`, as a reset does: no request has learnt from a ghost."""
        super().bind(table)
        self._learnt = RequestBook()
        self._ghostless: Sequence[OffloadKey] = ()

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Let every key in, after learning from its ghost, once a request."""
        ghosts = self._ghosts.known(keys)
        self._ghostless = keys if not ghosts else ()
        if ghosts and req_context.req_id is not None:
            ghosts = self._learnt.book(req_context.req_id, ghosts)
        if ghosts:
            self._learn(ghosts[::-1])
        return keys

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Take new blocks into T1; ghosts were looked for when the keys were let in."""
        if keys is not self._ghostless:
            super().insert_blocks(keys, ids)
            return
        first = self._lists[0]
        self.table.part[ids] = 1
        first.size += len(ids)
        first.append(ids)

    def on_request_finished(
        self,
        keys_in_prefix_order: Sequence[OffloadKey],
        req_context: ReqContext,
        outcome: RequestOutcome | None,
    ) -> None:
        """Order the request's held keys, head newest; those that it used again become frequent."""
        super().on_request_finished(keys_in_prefix_order, req_context, outcome)
        if req_context.req_id is not None:
            self._learnt.forget(req_context.req_id)
        if not isinstance(req_context, UsesContext):
            return
        keys = req_context.uses.keys(req_context.position, one_group=req_context.one_group)
        keys.reverse()
        reused, refused = req_context.uses.classes()
        if refused:
            keys = [key for key in keys if key not in refused]
        blocks = self.table.find(keys)
        if None in blocks:
            keys = [key for key, block in zip(keys, blocks, strict=True) if block is not None]
            blocks = [block for block in blocks if block is not None]
        if blocks:
            again = np.fromiter(map(reused.__contains__, keys), np.bool_, len(keys))
            self._use_blocks(np.array(blocks, np.int64), again)

    def _use_blocks(self, ids: Ids, again: npt.NDArray[np.bool_]) -> None:
        table, (first, second) = self.table, self._lists
        in_t1 = table.part[ids] == 1
        rises = in_t1 & again & (table.refs[ids] >= 0)
        stays = in_t1 & ~rises
        first.append(ids[stays])
        second.append(ids[~stays])
        risen = int(np.count_nonzero(rises))
        if risen:
            table.part[ids[rises]] = 2
            first.size -= risen
            second.size += risen
