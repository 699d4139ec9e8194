"""Asks an `AdaptiveCachePolicy` without a manager, in the order in which the plain reference decides.

A whole request at once: it is announced, its new keys are judged, everything that is to be stored is inserted, it ends,
and only then as much is evicted as is too much. Nothing is pinned, written or offered in steps, so policy and reference
must agree request by request.
"""

from __future__ import annotations

import numpy as np

from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.block_table import BlockTable
from kvoffload.manager.policies.adaptive import AdaptiveCachePolicy

from .adaptive_reference import Served


class PolicyAtOnce:
    """One policy of `capacity` blocks; no request has more than `longest` keys."""

    def __init__(self, capacity, longest):
        rows = capacity + longest
        self.capacity = capacity
        self.policy = AdaptiveCachePolicy(capacity)
        self._table = BlockTable(rows)
        self._free = list(range(rows))
        self._number = 0
        self._held = 0
        self.policy.bind(self._table)

    def serve(self, keys, now, answer_tokens):
        known = self.policy._tree.node_of
        first_new = next((at for at, key in enumerate(keys) if key not in known), len(keys))
        hits = next((at for at, block in enumerate(self._table.find(keys)) if block is None), len(keys))
        context = ReqContext(str(self._number), started_seconds=now)
        self._number += 1
        self.policy.touch_request(keys, context)
        new = keys[first_new:]
        admitted = self.policy.admit(new, context) if new else new
        stored = [key for key in [*keys[:first_new], *admitted] if self._table.get(key) is None]
        self._insert(stored)
        self.policy.on_request_finished(keys, context, RequestOutcome(now_seconds=now, output_tokens=answer_tokens))
        return Served(hits, stored, self._evict(self._held - self.capacity))

    def _insert(self, keys):
        if keys:
            ids = np.array([self._free.pop() for _ in keys], np.int64)
            self.policy.insert_blocks(keys, ids)
            self._table.keys[ids] = keys
            self._table.enter(keys, ids.tolist())
            self._held += len(keys)

    def _evict(self, count):
        if count <= 0:
            return []
        ids = self.policy.evict_blocks(count)
        keys = self._table.keys[ids].tolist()
        self._table.withdraw(keys)
        self._table.keys[ids] = None
        self._free += ids.tolist()
        self._held -= count
        return keys
