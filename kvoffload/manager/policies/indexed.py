"""`IndexedPolicy`: a policy that orders block numbers of a `BlockTable`, a batch at a time.

The manager's own policies are of this kind. They stay usable through the five methods of the reference, alone or beside
a manager: `get` returns views, and without a manager the `BlockStatus` objects given to `insert` are what counts.
`PolicyAdapter` is the other direction: it drives a policy that only has the reference's methods through batches.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.block_pool import check_block_count
from kvoffload.manager.block_table import BlockTable, Ids
from kvoffload.manager.policies.base import BlockStatus, CachePolicy

ANY_PART = 0
Victim = tuple[OffloadKey, BlockStatus]


class BatchPolicy(Protocol):
    """What a manager needs of a policy: batches of keys with their blocks, in matching order."""

    def evict_for(self, offered: Sequence[OffloadKey], idle: Ids, count: int) -> Ids | None:
        """Drop `count` blocks that nothing holds and no key of `offered` names; `idle` are the unpinned of those.

        The caller knows that there are so many; None when the policy has its own reasons.
        """

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Take new keys whose write begins; when it raises, none is taken."""

    def restore_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Take victims back: the insertion that they made room for raised."""

    def drop(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Forget held keys."""

    def drop_all(self, keys: Sequence[OffloadKey]) -> None:
        """Forget all keys (those of `keys`), and clear the table."""

    def written(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Writes ended well; the table's `refs` are 0 by now."""

    def pinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """`refs` rose by one."""

    def unpinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """`refs` fell by one."""


class BlockView(BlockStatus):
    """A `BlockStatus` whose `ref_cnt` is the block's entry in the table."""

    def __init__(self, table: BlockTable, block_id: int) -> None:
        ctypes.Structure.__init__(self)
        self._table = table
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """Loads that hold the block; -1 while it is written."""
        return int(self._table.refs[self.block_id])

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        self._table.refs[self.block_id] = value


class PartView(Mapping[OffloadKey, BlockStatus]):
    """The keys in one of a policy's lists, oldest first: a live view, made for looking, not for hot paths."""

    def __init__(self, policy: IndexedPolicy, part: int) -> None:
        self._policy = policy
        self._part = part

    def __getitem__(self, key: OffloadKey) -> BlockStatus:
        table = self._policy.table
        block = table.get(key)
        if block is None or not self._policy.members(self._part)[block]:
            raise KeyError(key)
        return self._policy.view(block)

    def __iter__(self) -> Iterator[OffloadKey]:
        table = self._policy.table
        ids = np.flatnonzero(self._policy.members(self._part))
        return iter(table.keys[ids[np.argsort(table.stamp[ids])]].tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._policy.members(self._part)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


class IndexedPolicy(CachePolicy):
    """Base of policies that work on block numbers; see the module's docstring.

    A subclass implements the methods named `*_blocks`, and `touch`.

    Attributes:
        table: The blocks; the manager's after `bind`.

    Raises:
        UsageError: `cache_capacity` is no number of blocks.
    """

    table: BlockTable

    def __init__(self, cache_capacity: int) -> None:
        check_block_count("cache_capacity", cache_capacity)
        self.cache_capacity = cache_capacity
        self._statuses: dict[int, BlockStatus] = {}
        self._free: list[int] = []
        self.bind(BlockTable(0))

    @abstractmethod
    def bind(self, table: BlockTable) -> None:
        """Work on `table` from now on, in an empty order: called before anything is inserted, and by `clear`."""

    @abstractmethod
    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        """Take new blocks, the last one newest."""

    @abstractmethod
    def evict_blocks(self, count: int) -> Ids:
        """Drop `count` blocks with `refs == 0`, the first victim first; the caller knows that there are so many."""

    @abstractmethod
    def remove_blocks(self, ids: Ids) -> None:
        """Forget held blocks."""

    @abstractmethod
    def release_blocks(self, ids: Ids) -> None:
        """`refs` of these blocks fell (or rose, after a write) to 0."""

    def members(self, part: int) -> npt.NDArray[np.bool_]:
        """Return a column: which blocks are in one of its lists, or in any."""
        mask: npt.NDArray[np.bool_] = self.table.part == part if part else self.table.part != 0
        return mask

    # ---- how a manager drives it

    def evict_for(self, offered: Sequence[OffloadKey], idle: Ids, count: int) -> Ids | None:  # noqa: ARG002
        if not len(idle):
            return self.evict_blocks(count)
        self.table.refs[idle] = 1
        victims = self.evict_blocks(count)
        self.table.refs[idle] = 0
        if self.table.num_parked:
            self.release_blocks(idle)
        return victims

    def restore_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None: ...

    def drop(self, keys: Sequence[OffloadKey], ids: Ids) -> None:  # noqa: ARG002
        self.remove_blocks(ids)

    def drop_all(self, keys: Sequence[OffloadKey]) -> None:  # noqa: ARG002
        self.clear()

    def written(self, keys: Sequence[OffloadKey], ids: Ids) -> None:  # noqa: ARG002
        if self.table.num_parked:
            self.release_blocks(ids)

    def pinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None: ...

    def unpinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None:  # noqa: ARG002
        if self.table.num_parked:
            self.release_blocks(ids[self.table.refs[ids] == 0])

    # ---- the reference's methods

    def view(self, block: int) -> BlockStatus:
        """Return the status of a held block."""
        status = self._statuses.get(block)
        return BlockView(self.table, block) if status is None else status

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.table.get(key)
        return None if block is None else self.view(block)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        table = self.table
        if not self._free:
            rows = table.num_blocks
            table.grow(2 * rows + 8)
            self._free = list(range(2 * rows + 7, rows - 1, -1))
        row = self._free.pop()
        self._statuses[row] = block
        table.enter((key,), (row,))
        table.keys[row] = key
        table.refs[row] = block.ref_cnt
        self.insert_blocks((key,), np.array((row,), np.int64))

    def remove(self, key: OffloadKey) -> None:
        block = self.table.get(key)
        if block is None:
            raise KeyError(key)
        self.remove_blocks(np.array((block,), np.int64))
        self._forget(key, block)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[Victim] | None:
        if n <= 0:
            return []
        self.sync()
        table = self.table
        idle = np.flatnonzero(self.members(ANY_PART) & (table.refs == 0))
        kept = np.array([block for block in map(table.get, protected) if block is not None], np.int64)
        kept = kept[table.refs[kept] == 0]
        if len(idle) - len(kept) < n:
            return None
        ids = self.evict_for(tuple(protected), kept, n)
        if ids is None:
            return None
        victims = [(key, self.view(block)) for key, block in zip(table.keys[ids].tolist(), ids.tolist(), strict=True)]
        for (key, _), block in zip(victims, ids.tolist(), strict=True):
            self._forget(key, block)
        return victims

    def clear(self) -> None:
        """Forget every key; the order starts anew."""
        self._free += self._statuses
        self._statuses.clear()
        self.table.clear()
        self.bind(self.table)

    def sync(self) -> None:
        """Read the reference counts of statuses that were given to `insert`: nobody tells when they change."""
        if not self._statuses:
            return
        table = self.table
        for row, status in self._statuses.items():
            table.refs[row] = status.ref_cnt
        if table.num_parked:
            self.release_blocks(np.flatnonzero(table.parked & (table.refs == 0)))

    def _forget(self, key: OffloadKey, block: int) -> None:
        self.table.withdraw((key,))
        self.table.keys[block] = None
        if self._statuses.pop(block, None) is not None:
            self._free.append(block)


class PolicyAdapter:
    """Drives a policy of five methods and hooks with batches; keeps its `BlockStatus` objects true."""

    def __init__(self, policy: CachePolicy, table: BlockTable) -> None:
        self._policy = policy
        self._table = table
        self._statuses: dict[int, BlockStatus] = {}

    def evict_for(self, offered: Sequence[OffloadKey], idle: Ids, count: int) -> Ids | None:  # noqa: ARG002
        victims = self._policy.evict(count, set(offered))
        if victims is None:
            return None
        keys = [key for key, _ in victims]
        ids = self._table.find(keys)
        refs = self._table.cells[1]
        may_go = all(block is not None and refs[block] == 0 for block in ids) and set(offered).isdisjoint(keys)
        if not may_go or not len(set(keys)) == len(keys) == count:
            self._put_back(victims)
            named = f"{type(self._policy).__module__}:{type(self._policy).__qualname__}"
            raise UsageError(
                f"cache policy {named}: evict must name {count} different victims that are held, not pinned, not being "
                f"written and not protected, or return None; it named {len(keys)}, or others"
            )
        for block in ids:
            del self._statuses[block]
        return np.array(ids, np.int64)

    def _put_back(self, victims: Sequence[Victim]) -> None:
        """Give a policy what it dropped again, as far as that was held; as the newest: `insert` takes no place."""
        for key in dict.fromkeys(key for key, _ in victims):
            block = self._table.get(key)
            if block is not None and self._policy.get(key) is None:
                self._policy.insert(key, self._statuses[block])

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        inserted: list[OffloadKey] = []
        try:
            for key, block in zip(keys, ids.tolist(), strict=True):
                status = BlockStatus(block)
                self._policy.insert(key, status)
                self._statuses[block] = status
                inserted.append(key)
        except BaseException:
            for key in inserted:
                self._policy.remove(key)
            raise

    def restore_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        for key, block in zip(keys, ids.tolist(), strict=True):
            status = self._statuses[block] = BlockStatus(block)
            status.ref_cnt = 0
            self._policy.insert(key, status)

    def drop(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        for key, block in zip(keys, ids.tolist(), strict=True):
            self._policy.remove(key)
            del self._statuses[block]

    def drop_all(self, keys: Sequence[OffloadKey]) -> None:
        if type(self._policy).clear is CachePolicy.clear:
            for key in keys:
                self._policy.remove(key)
        else:
            self._policy.clear()
        self._statuses.clear()
        self._table.clear()

    def written(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        self._copy_refs(ids)
        self._policy.on_ready(keys)

    def pinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        self._copy_refs(ids)
        fresh = [key for key, block in zip(keys, ids.tolist(), strict=True) if self._statuses[block].ref_cnt == 1]
        if fresh:
            self._policy.on_pinned(fresh)

    def unpinned(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        self._copy_refs(ids)
        idle = [key for key, block in zip(keys, ids.tolist(), strict=True) if self._statuses[block].ref_cnt == 0]
        if idle:
            self._policy.on_unpinned(idle)

    def _copy_refs(self, ids: Ids) -> None:
        statuses = self._statuses
        for block, refs in zip(ids.tolist(), self._table.refs[ids].tolist(), strict=True):
            statuses[block].ref_cnt = refs


_ADAPTED = ("get", "insert", "remove", "evict", "on_ready", "on_pinned", "on_unpinned")


def order_of(policy: CachePolicy, table: BlockTable) -> BatchPolicy:
    """Return how a manager drives `policy` on its table: directly, or, where its class says more, by the adapter."""
    kind = type(policy)
    if isinstance(policy, IndexedPolicy) and all(getattr(kind, m) is getattr(IndexedPolicy, m) for m in _ADAPTED):
        policy.bind(table)
        return policy
    return PolicyAdapter(policy, table)
