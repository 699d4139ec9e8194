"""The adaptive policy: keeps what buys the most hits per block and second, as learnt from the requests themselves.

Theory of operation. Keys form a radix tree (`adaptive_tree`); what is evicted is always the end of a run without held
children, so what is held stays a set of whole prefixes. When a request ends, its runs are sorted into classes by how
they are used (the first turn of a conversation, a later one, the path of a living conversation, shared prefixes by
popularity), by how much was asked and answered, and by the hints given; each class learns how likely its blocks return
at which age (`adaptive_hazard`). A shadow LRU (`adaptive_guard`) shows what plain LRU would have hit, and takes over
where that is more.

The life of a request: `touch_request` finds its path and keeps it out of the eviction order, `admit` decides once
whether its new blocks are worth a copy, `on_request_finished` learns. Whatever is missing is made up for: keys stored
without a request are runs of their own, a touch without a request id counts as a request that ends at the next one, and
without times each request counts as a second.

Hints (`RequestOutcome`): `conversation_ended` is one class of its own, `expected_return_seconds` one for each doubling.
A hint has no meaning by itself, its class learns what follows, so wrong hints cost little. `ReqContext.priority` p
multiplies the worth of the request's blocks by 2**p, within -8 to 8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.block_pool import check_block_count
from kvoffload.manager.block_table import NO_IDS, BlockTable, Ids
from kvoffload.manager.policies.adaptive_eviction import EvictionOrder
from kvoffload.manager.policies.adaptive_guard import LRUGuard, ShadowLRU
from kvoffload.manager.policies.adaptive_hazard import FIRST_TURN
from kvoffload.manager.policies.adaptive_node import Node, RequestState
from kvoffload.manager.policies.adaptive_request import (
    Ending,
    RequestLearner,
    clamp_priority,
    group_chains,
    hint_number,
)
from kvoffload.manager.policies.adaptive_table import ReuseTable
from kvoffload.manager.policies.adaptive_tree import RadixTree
from kvoffload.manager.policies.indexed import IndexedPolicy, PartView

REFERENCE_BLOCK_TOKENS = 512
"""The policy's constants are in blocks of this size; it is assumed until `set_block_tokens` is called."""

_HELD = 1
_DECAY_REQUESTS = 2_000
_OPEN_REQUESTS = 1_024
_MIN_GHOSTS, _GHOSTS_PER_BLOCK = 4_096, 4


class AdaptiveCachePolicy(IndexedPolicy):
    """Evicts by learnt reuse per block-second; see the module's docstring.

    Args:
        cache_capacity: Blocks in the pool.

    Attributes:
        blocks: Held keys with their status: a view.

    Raises:
        UsageError: `cache_capacity` is no number of blocks.
    """

    def __init__(self, cache_capacity: int) -> None:
        check_block_count("cache_capacity", cache_capacity)
        self._reuse = ReuseTable()
        max_ghosts = max(_MIN_GHOSTS, _GHOSTS_PER_BLOCK * cache_capacity)
        self._tree = RadixTree(self._reuse.get((FIRST_TURN, 0, 0, 0)), self._place, max_ghosts, cache_capacity)
        self._eviction = EvictionOrder(self._tree, self._reuse)
        self._guard = LRUGuard()
        self._shadow = ShadowLRU(cache_capacity)
        self._learner = RequestLearner(self._tree, self._reuse, self._guard, self._shadow, self._place)
        self._open: OrderedDict[str | None, RequestState] = OrderedDict()
        self._held = 0
        self._finished = 0
        self._clock_base: float | None = None
        self._declined_blocks = 0
        super().__init__(cache_capacity)
        self.blocks = PartView(self, _HELD)

    # ---- batches of blocks

    def bind(self, table: BlockTable) -> None:
        self.table = table

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        for node in self._tree.hold(tuple(keys)):
            self._place(node)
        self._note_held(ids)

    def restore_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        self.insert_blocks(keys[::-1], ids)

    def remove_blocks(self, ids: Ids) -> None:
        self.drop(self.table.keys[ids].tolist(), ids)

    def drop(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        for key in reversed(keys):
            self._place(self._tree.release(key))
        self._note_gone(ids)

    def release_blocks(self, ids: Ids) -> None:
        table = self.table
        table.num_parked -= int(np.count_nonzero(table.parked[ids]))
        table.parked[ids] = False
        self._place_nodes_of(table.keys[ids].tolist())

    def evict_blocks(self, count: int) -> Ids:
        victims = self.evict_for((), NO_IDS, count)
        return NO_IDS if victims is None else victims

    def evict_for(self, offered: Sequence[OffloadKey], idle: Ids, count: int) -> Ids | None:
        refs, kept = self.table.refs, set(idle.tolist())
        refs[idle] = 1
        victims = self._take(count, offered, kept)
        if victims is None and any(state.open for state in self._open.values()):
            for state in self._open.values():
                self._let_go(state)
            victims = self._take(count, offered, kept)
        refs[idle] = 0
        if victims is None:
            return None
        ids = np.array(victims, np.int64)
        self._note_gone(ids)
        self._tree.trim_ghosts(self._held)
        return ids

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        self._begin(ReqContext(), keys)

    def clear(self) -> None:
        for state in self._open.values():
            state.open = False
        self._open.clear()
        self._tree.clear()
        self._reuse.clear()
        self._shadow.clear()
        self._held = 0
        super().clear()

    def _take(self, count: int, offered: Sequence[OffloadKey], kept: set[int]) -> list[int] | None:
        return self._eviction.take(count, offered, kept, self.table, plain_lru=self._guard.plain_lru)

    def _note_held(self, ids: Ids) -> None:
        self.table.part[ids] = _HELD
        self._held += len(ids)

    def _note_gone(self, ids: Ids) -> None:
        table = self.table
        table.part[ids] = 0
        self._held -= len(ids)
        if table.num_parked:
            table.num_parked -= int(np.count_nonzero(table.parked[ids]))
            table.parked[ids] = False

    # ---- hooks

    def set_block_tokens(self, tokens: int) -> None:
        self._reuse.weight = tokens / REFERENCE_BLOCK_TOKENS

    def touch_request(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._begin(req_context, keys)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        state = self._open.get(req_context.req_id)
        if state is None:
            return keys
        if self._tree.node_of.first_unknown(keys) is not None:
            self._learner.adopt(keys, state)
        if state.declined:
            admitted: list[OffloadKey] = []
        elif self._guard.plain_lru or self._held + len(keys) <= self.cache_capacity:
            return keys
        else:
            admitted = self._learner.worth_storing(keys, state, req_context.priority)
            state.declined = len(admitted) < len(keys)
        self._declined_blocks += len(keys) - len(admitted)
        return admitted

    def on_request_finished(
        self, keys_in_prefix_order: Sequence[OffloadKey], req_context: ReqContext, outcome: RequestOutcome | None
    ) -> None:
        state = self._open.pop(req_context.req_id, None)
        self._finish(state, keys_in_prefix_order, req_context.priority, outcome)

    def stats(self) -> dict[str, float]:
        return {
            **self._guard.stats(),
            "declined_blocks": self._declined_blocks,
            "ghost_blocks": len(self._tree.node_of) - self._held,
            "reuse_classes": len(self._reuse.classes),
            "finished_requests": self._finished,
            "open_requests": len(self._open),
        }

    # ---- a request begins and ends

    def _begin(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        req_id, chains = context.req_id, group_chains(keys)
        state = self._open.get(req_id)
        if state is not None and req_id is not None:
            if not state.is_continued_by(chains):
                self._let_go(state)
                state = self._open[req_id] = state.successor()
            self._learner.again(state, chains)
            return
        if state is not None:
            del self._open[None]
            self._finish(state, (), 0, None)
        elif len(self._open) >= _OPEN_REQUESTS:
            self._finish(self._open.popitem(last=False)[1], (), 0, None)
        self._tick(context.started_seconds)
        state = self._open[req_id] = RequestState(chains)
        if context.started_seconds is not None:
            state.start = self._reuse.now
        self._learner.begin(state)

    def _finish(
        self, state: RequestState | None, keys: Sequence[OffloadKey], priority: int, outcome: RequestOutcome | None
    ) -> None:
        end = outcome.now_seconds if outcome is not None else None
        if end is None and self._clock_base is None:
            self._advance(self._reuse.now + 1.0)
        self._tick(end)
        chains = group_chains(keys) if keys or state is None else state.chains
        if state is None:  # it was never touched: which keys it found is known by the finished requests before it
            state = RequestState(chains)
            self._learner.begin(state)
            state.matched = []
        ending = Ending(
            start=self._reuse.now if state.start is None else state.start,
            answer_tokens=(outcome.output_tokens if outcome is not None else None) or 0,
            hint=hint_number(outcome),
            priority=clamp_priority(priority),
        )
        state.prospects = None
        if self._learner.finish(state, chains, ending) and chains == state.chains:
            state.open = False
        else:  # some of its nodes were not on the path
            self._let_go(state)
        self._finished += 1
        self._reuse.rerank()
        if self._finished % _DECAY_REQUESTS == 0:
            self._reuse.decay()
        self._tree.trim_ghosts(self._held)

    def _tick(self, seconds: float | None) -> None:
        """Move the policy's clock, which starts at 0, to the caller's time, never back."""
        if seconds is not None and isfinite(seconds):
            if self._clock_base is None:
                self._clock_base = seconds - self._reuse.now
            self._advance(max(self._reuse.now, seconds - self._clock_base))

    def _advance(self, now: float) -> None:
        self._tree.now = now
        self._reuse.advance(now)

    # ---- upkeep

    def _place(self, node: Node) -> None:
        """Put a node into the eviction order if its end may be evicted."""
        if node.held and not node.live_kids and node.cell is None and (node.busy is None or not node.busy.open):
            self._reuse.place(node)

    def _place_nodes_of(self, keys: Iterable[OffloadKey]) -> None:
        find = self._tree.node_of.get
        last: Node | None = None
        for key in keys:
            node = find(key)
            if node is not last and node is not None:
                self._place(node)
                last = node

    def _let_go(self, state: RequestState) -> None:
        """End a request's claim on its nodes."""
        if state.open:
            state.open = False
            for chain in state.chains:
                self._place_nodes_of(chain)
