"""What a cache policy is: `BlockStatus` and the `CachePolicy` contract. Reference, chapter 5.

The manager owns memory, pins and tickets; a policy only orders keys and names victims. The five methods of the
reference (`get`, `insert`, `remove`, `touch`, `evict`) are the whole duty; everything else is a hook with a default, so
a policy written for the reference runs unchanged.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome

WRITING = -1
"""`BlockStatus.ref_cnt` of a block whose copy has not ended: not readable, not evictable."""


class BlockStatus(ctypes.Structure):
    """One block of host memory that a key names: 16 bytes, invisible to the garbage collector.

    Attributes:
        ref_cnt: -1 while it is written, else the number of loads that hold it.
        block_id: Row of the CPU tensors.
    """

    _fields_ = (("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64))
    ref_cnt: int
    block_id: int

    def __init__(self, block_id: int) -> None:
        super().__init__()
        self.ref_cnt = WRITING
        self.block_id = block_id

    @property
    def is_ready(self) -> bool:
        """Whether the block can be read."""
        return self.ref_cnt >= 0

    def __repr__(self) -> str:
        return f"BlockStatus(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


class CachePolicy(ABC):
    """Orders the keys of one manager and chooses which leave.

    Called by the manager alone, from its owner's thread. A method that raises must leave the policy as it was. Keys
    come in prefix order: the head of a sequence first.

    Args:
        cache_capacity: Blocks in the pool.
    """

    @abstractmethod
    def __init__(self, cache_capacity: int) -> None: ...

    @abstractmethod
    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the status of a held key, readable or not; None when it is not held. A pure read."""

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Take a key that is not held; its write begins (`ref_cnt` is -1 until `on_ready`)."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Forget a held key: its write failed, or its content became invalid. Not an eviction: leaves no ghost."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Mark keys as used now, so that a prefix's head is newer than its tail. Absent keys are given too."""

    @abstractmethod
    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Drop `n` keys with `ref_cnt == 0` that are not in `protected`, the first victim first.

        Returns:
            The victims; None when there are not enough, and then nothing has changed.
        """

    # Hooks: all are optional.

    def set_block_tokens(self, tokens: int) -> None:
        """A block holds so many tokens; told once, before anything is inserted, by managers that know it."""

    def touch_request(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """A request begins, and these are its keys: `touch` for policies that tell requests apart."""
        self.touch(keys)

    def refresh(self, keys: Iterable[OffloadKey]) -> None:
        """Mark keys as used now without counting it as another use: they were only stored. By default a `touch`."""
        self.touch(keys)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:  # noqa: ARG002
        """Return those of `keys` (offered, not held) that are worth storing; called before `evict`."""
        return keys

    def on_ready(self, keys: Sequence[OffloadKey]) -> None:
        """The writes of `keys` ended well: they are readable and, unpinned, evictable from now on."""

    def on_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """The pin counts of `keys` rose from 0 to 1: they cannot be evicted now."""

    def on_unpinned(self, keys: Sequence[OffloadKey]) -> None:
        """The pin counts of `keys` fell from 1 to 0."""

    def on_request_finished(
        self, keys_in_prefix_order: Sequence[OffloadKey], req_context: ReqContext, outcome: RequestOutcome | None
    ) -> None:
        """A request ended; `keys_in_prefix_order` are all its keys, held or not, group after group."""

    def clear(self) -> None:
        """Forget every key and what was learnt from it: the content is invalid.

        Not called on a policy that does not override it: the manager removes key by key instead.
        """

    def stats(self) -> dict[str, float]:
        """Return figures of the policy's own, by name; they go to the metrics as they are."""
        return {}
