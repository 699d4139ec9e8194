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

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
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
from kvoffload.manager.policies.base import BlockStatus, CachePolicy

REFERENCE_BLOCK_TOKENS = 512
"""The policy's constants are in blocks of this size."""

_DECAY_REQUESTS = 2_000
_OPEN_REQUESTS = 1_024
_MIN_GHOSTS, _GHOSTS_PER_BLOCK = 4_096, 4


class AdaptiveCachePolicy(CachePolicy):
    """Evicts by learnt reuse per block-second; see the module's docstring.

    Args:
        cache_capacity: Blocks in the pool.
        block_tokens: Tokens in one block.
    """

    def __init__(self, cache_capacity: int, block_tokens: int = REFERENCE_BLOCK_TOKENS) -> None:
        self.cache_capacity = cache_capacity
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self._table = ReuseTable(block_tokens / REFERENCE_BLOCK_TOKENS)
        max_ghosts = max(_MIN_GHOSTS, _GHOSTS_PER_BLOCK * cache_capacity)
        self._tree = RadixTree(self._table.get((FIRST_TURN, 0, 0, 0)), self._place, max_ghosts)
        self._eviction = EvictionOrder(self._tree, self._table, self.blocks)
        self._guard = LRUGuard()
        self._shadow = ShadowLRU(cache_capacity)
        self._learner = RequestLearner(self._tree, self._table, self._guard, self._shadow, self._place)
        self._open: OrderedDict[str | None, RequestState] = OrderedDict()
        self._finished = 0
        self._clock_base: float | None = None
        self._declined_blocks = 0

    # ---- the reference's five

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        if key not in self.blocks:
            node = self._tree.hold(key)
            if node.held == 1 or block.ref_cnt == 0:
                self._place(node)
        self.blocks[key] = block

    def remove(self, key: OffloadKey) -> None:
        del self.blocks[key]
        self._place(self._tree.release(key))

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        self._begin(ReqContext(), keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        if n <= 0:
            return []
        victims = self._eviction.take(n, protected, plain_lru=self._guard.plain_lru)
        if victims is None and self._open:
            for state in self._open.values():
                self._let_go(state)
            victims = self._eviction.take(n, protected, plain_lru=self._guard.plain_lru)
        if victims is None:
            return None
        evicted = [(key, self.blocks.pop(key)) for key in victims]
        self._tree.trim_ghosts(len(self.blocks))
        return evicted

    # ---- hooks

    def touch_request(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._begin(req_context, keys)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        state = self._open.get(req_context.req_id)
        if state is None:
            return keys
        node_of = self._tree.node_of
        if any(key not in node_of for key in keys):
            self._learner.adopt(keys, state)
        if state.declined:
            admitted: list[OffloadKey] = []
        elif self._guard.plain_lru or len(self.blocks) + len(keys) <= self.cache_capacity:
            return keys
        else:
            admitted = self._learner.worth_storing(keys, state, req_context.priority)
            state.declined = len(admitted) < len(keys)
        self._declined_blocks += len(keys) - len(admitted)
        return admitted

    def on_ready(self, keys: Sequence[OffloadKey]) -> None:
        self._place_nodes_of(keys)

    def on_unpinned(self, keys: Sequence[OffloadKey]) -> None:
        self._place_nodes_of(keys)

    def on_request_finished(
        self, keys_in_prefix_order: Sequence[OffloadKey], req_context: ReqContext, outcome: RequestOutcome | None
    ) -> None:
        state = self._open.pop(req_context.req_id, None)
        self._finish(state, keys_in_prefix_order, req_context.priority, outcome)

    def clear(self) -> None:
        for state in self._open.values():
            state.open = False
        self._open.clear()
        self.blocks.clear()
        self._tree.clear()
        self._table.clear()
        self._shadow.clear()

    def stats(self) -> dict[str, float]:
        known, held = len(self._tree.node_of), len(self.blocks)
        return {
            **self._guard.stats(),
            "declined_blocks": self._declined_blocks,
            "ghost_blocks": known - held,
            "reuse_classes": len(self._table.classes),
            "finished_requests": self._finished,
            "open_requests": len(self._open),
        }

    # ---- a request begins and ends

    def _begin(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        req_id, chains = context.req_id, group_chains(keys)
        state = self._open.get(req_id)
        if state is not None and req_id is not None:
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
            state.start = self._table.now
        self._learner.begin(state)

    def _finish(
        self, state: RequestState | None, keys: Sequence[OffloadKey], priority: int, outcome: RequestOutcome | None
    ) -> None:
        end = outcome.now_seconds if outcome is not None else None
        if end is None and self._clock_base is None:
            self._advance(self._table.now + 1.0)
        self._tick(end)
        chains = group_chains(keys) if keys or state is None else state.chains
        if state is None:  # it was never touched: which keys it found is known by the finished requests before it
            state = RequestState(chains)
            self._learner.begin(state)
            state.matched = []
        ending = Ending(
            start=self._table.now if state.start is None else state.start,
            answer_tokens=(outcome.output_tokens if outcome is not None else None) or 0,
            hint=hint_number(outcome),
            priority=clamp_priority(priority),
        )
        state.prospects = None
        self._learner.finish(state, chains, ending)
        self._let_go(state)
        self._finished += 1
        self._table.rerank()
        if self._finished % _DECAY_REQUESTS == 0:
            self._table.decay()
        self._tree.trim_ghosts(len(self.blocks))

    def _tick(self, seconds: float | None) -> None:
        """Move the policy's clock, which starts at 0, to the caller's time, never back."""
        if seconds is not None and isfinite(seconds):
            if self._clock_base is None:
                self._clock_base = seconds - self._table.now
            self._advance(max(self._table.now, seconds - self._clock_base))

    def _advance(self, now: float) -> None:
        self._tree.now = now
        self._table.advance(now)

    # ---- upkeep

    def _place(self, node: Node) -> None:
        """Put a node into the eviction order if its end may be evicted."""
        if node.held and not node.live_kids and node.cell is None and (node.busy is None or not node.busy.open):
            self._table.place(node)

    def _place_nodes_of(self, keys: Sequence[OffloadKey]) -> None:
        node_of = self._tree.node_of
        last: Node | None = None
        for key in keys:
            node = node_of[key]
            if node is not last:
                self._place(node)
                last = node

    def _let_go(self, state: RequestState) -> None:
        """End a request's claim on its nodes."""
        if not state.open:
            return
        state.open = False
        for chain in state.chains:
            self._place_nodes_of([key for key in chain if key in self.blocks])
