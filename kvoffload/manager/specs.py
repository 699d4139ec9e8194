"""The `LoadStoreSpec` family: where the blocks of one transfer are. Reference, chapters 1.3, 1.7 and 10; numpy only."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from kvoffload.errors import UsageError

_MAX_ID = np.iinfo(np.int64).max
BlockIds = Sequence[int] | npt.NDArray[np.integer]


class LoadStoreSpec(ABC):
    """Where the data of one side of a transfer is.

    Attributes:
        ticket: Names the reservation it came from (see `OffloadingManager`); None for specs made by a caller.
    """

    ticket: int | None = None

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the medium's name, `"GPU"` or `"CPU"`; handlers are routed by it."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks of one medium by id.

    Attributes:
        block_ids: int64 array, shape `(num_blocks,)`.
    """

    def __init__(self, block_ids: BlockIds, ticket: int | None = None) -> None:
        ids = np.asarray(block_ids)
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UsageError(f"block_ids must be a flat list of integers, got {ids.dtype} of shape {ids.shape}")
        if ids.size and int(ids.min()) < 0:
            raise UsageError(f"block_ids must be at least 0; got {int(ids.min())}")
        if ids.dtype == np.uint64 and ids.size and int(ids.max()) > _MAX_ID:
            raise UsageError(f"block_ids must be below 2**63; got {int(ids.max())}")
        self.block_ids: npt.NDArray[np.int64] = ids.astype(np.int64, copy=not isinstance(block_ids, np.ndarray))
        self.ticket = ticket

    @classmethod
    def of_blocks(cls, block_ids: npt.NDArray[np.int64], ticket: int | None = None) -> Self:
        """Return a spec around an int64 array that is known to be good; neither checked nor copied."""
        spec = cls.__new__(cls)
        spec.block_ids = block_ids
        spec.ticket = ticket
        return spec

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.block_ids[:8].tolist())) + (", ..." if len(self.block_ids) > 8 else "")
        return f"{type(self).__name__}([{shown}], ticket={self.ticket})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Engine blocks on the GPU side of a transfer, group after group. Reference, chapter 1.7.

    Attributes:
        group_sizes: Engine blocks per KV-cache group; their sum is `len(block_ids)`.
        block_indices: Per group, the position of its first block in the sequence, in engine blocks: a load whose
            `block_indices[g] % factor` is not 0 starts inside an offloaded block.
    """

    def __init__(
        self, block_ids: BlockIds, group_sizes: Sequence[int], block_indices: Sequence[int], ticket: int | None = None
    ) -> None:
        super().__init__(block_ids, ticket)
        sizes, indices = _numbers(group_sizes, "group_sizes"), _numbers(block_indices, "block_indices")
        if any(size < 0 for size in sizes) or sum(sizes) != len(self.block_ids):
            raise UsageError(
                f"group_sizes must be counts of at least 0 that add up to the {len(self.block_ids)} block_ids; "
                f"got {list(sizes)}"
            )
        if len(indices) != len(sizes) or any(index < 0 for index in indices):
            raise UsageError(
                f"block_indices must hold one index of at least 0 for each of the {len(sizes)} groups; "
                f"got {list(indices)}"
            )
        self.group_sizes: tuple[int, ...] = sizes
        self.block_indices: tuple[int, ...] = indices

    @staticmethod
    def medium() -> str:
        """Return `"GPU"`."""
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Offloaded blocks in host memory: row numbers of the CPU tensors. Reference, chapter 10."""

    @staticmethod
    def medium() -> str:
        """Return `"CPU"`."""
        return "CPU"


def _numbers(values: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise UsageError(
            f"{name} must be a list of whole numbers, one for each KV-cache group; got {values!r}"
        ) from None
