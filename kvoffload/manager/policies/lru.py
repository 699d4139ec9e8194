"""Least recently used. Reference, chapter 5.2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import ABSENT, BlockTable, Ids
from kvoffload.manager.policies.indexed import ANY_PART, IndexedPolicy, PartView
from kvoffload.manager.policies.recency import Clock, RecencyLog


class LRUCachePolicy(IndexedPolicy):
    """Evicts the key that was not used for longest.

    Attributes:
        blocks: Held keys, the next victim first (a view).
    """

    def bind(self, table: BlockTable) -> None:
        self.table = table
        self.blocks = PartView(self, ANY_PART)
        self._log = RecencyLog(table, Clock())

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        ids = self.table.recall(keys)
        if len(ids) < len(keys):
            found = self.table.find(keys[len(ids) :])
            others = np.array([block for block in found if block is not None], np.int64)
            ids = np.concatenate((ids, others)) if len(ids) else others
        if len(ids):
            self._log.append(ids[::-1])

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:  # noqa: ARG002
        self._log.size += len(ids)
        self._log.append(ids)

    def evict_blocks(self, count: int) -> Ids:
        ids = self._log.take(count)
        self._log.size -= len(ids)
        return ids

    def remove_blocks(self, ids: Ids) -> None:
        self._log.remove(ids)
        self._log.size -= len(ids)

    def release_blocks(self, ids: Ids) -> None:
        self._log.release(ids)

    def members(self, part: int) -> npt.NDArray[np.bool_]:  # noqa: ARG002 - there is one list
        mask: npt.NDArray[np.bool_] = self.table.stamp != ABSENT
        return mask
