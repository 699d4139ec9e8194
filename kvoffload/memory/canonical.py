"""The block-wise form of an engine's KV caches, whatever the attention back end's layout. Reference, chapter 1.8.

Every layout becomes tensors of shape `(num_blocks, page_size_bytes)`; below this module everything works on addresses,
strides and sizes (`BlockTensor`). torch is loaded only by `torch_view`; torch tensors that are handed in are read
through their methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.memory.block_tensor import BlockTensor, StridedMemory, TensorLike, as_block_tensor, strided_memory


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One tensor whose first dimension counts blocks.

    Attributes:
        tensor: Shape `(num_blocks, page_size_bytes)`, int8: torch, numpy, `BlockTensor`, or any shape whose rows have
            that many bytes. Rows may be further apart than their length.
        page_size_bytes: Bytes of one block in this tensor, padding included.
        view: The same memory as addresses and strides.
    """

    tensor: TensorLike
    page_size_bytes: int
    view: BlockTensor = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        view = as_block_tensor(self.tensor)
        if view.row_bytes != self.page_size_bytes:
            raise LayoutError(
                f"page_size_bytes is {self.page_size_bytes}, but the tensor's rows have {view.row_bytes} bytes: "
                "pass page_size_bytes=<bytes of one row>, and the used part of a padded page in CanonicalKVCacheRef"
            )
        object.__setattr__(self, "view", view)


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer's share of a canonical tensor.

    Attributes:
        tensor_idx: Index in `CanonicalKVCaches.tensors`.
        page_size_bytes: Bytes of a page that the layer uses, without padding; only these are copied.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The KV caches of one rank: the unique tensors, and which of them each KV-cache group's layers use.

    Attributes:
        tensors: Unique tensors, all with the same number of blocks on the same device.
        group_data_refs: Per group, one reference per layer tensor.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "group_data_refs", tuple(tuple(refs) for refs in self.group_data_refs))
        if not self.tensors or not self.group_data_refs:
            raise LayoutError(
                "CanonicalKVCaches needs at least one tensor and one group: make it with from_layers(...)"
            )
        first = self.tensors[0].view
        for idx, tensor in enumerate(self.tensors):
            if tensor.view.num_blocks != first.num_blocks or tensor.view.device != first.device:
                raise LayoutError(
                    f"tensor {idx} has {tensor.view.num_blocks} blocks on {tensor.view.device!r}, "
                    f"tensor 0 has {first.num_blocks} on {first.device!r}: all must share one block table and device"
                )
        for group, refs in enumerate(self.group_data_refs):
            for ref in refs:
                if not 0 <= ref.tensor_idx < len(self.tensors):
                    raise LayoutError(
                        f"tensor_idx of group {group} must be 0 to {len(self.tensors) - 1}; got {ref.tensor_idx}"
                    )
                page = self.tensors[ref.tensor_idx].page_size_bytes
                if not 0 < ref.page_size_bytes <= page:
                    raise LayoutError(
                        f"page_size_bytes of group {group} must be at most the {page} bytes of a page of tensor "
                        f"{ref.tensor_idx}; got {ref.page_size_bytes}"
                    )

    @property
    def num_blocks(self) -> int:
        """Engine blocks in each tensor."""
        return self.tensors[0].view.num_blocks

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self.group_data_refs)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one engine block takes, each unique tensor counted once."""
        return sum(tensor.page_size_bytes for tensor in self.tensors)

    @property
    def device(self) -> str:
        """The device of all tensors, `"cpu"` or for example `"cuda:0"`."""
        return self.tensors[0].view.device

    @classmethod
    def from_layers(
        cls,
        layers: Mapping[str, TensorLike],
        *,
        block_dim: int | None = None,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> Self:
        """Build from an engine's layers by name.

        A layer is one tensor, or a `(K, V)` tuple of tensors whose dimension 0 counts blocks. For single tensors:

        ====================================  ===========================================
        shape                                 call
        ====================================  ===========================================
        `(2, num_blocks, ...)`, K/V first     `block_dim=1`
        `(num_blocks, 2, ...)`, K/V second    `block_dim=0`
        `(num_blocks, ...)`, MLA, one page    `block_dim=0`, or none if dim 0 is not 1 or 2
        ====================================  ===========================================

        Rows may be padded or interleaved (a stride longer than the row); the bytes of one block, or of its K and of its
        V, must be dense. The same memory under two names is copied once a group.

        Args:
            layers: Tensors by layer name, all on one device with the same number of blocks.
            block_dim: The dimension that counts blocks in layers that are single tensors, 0 or 1.
            groups: Layer names per KV-cache group, each layer in exactly one; None puts all layers in one group.

        Raises:
            LayoutError: The layout is ambiguous, not dense, on mixed devices, or of unequal block counts; the message
                names layer, shape, stride and the right call.
        """
        if not isinstance(layers, Mapping):
            raise LayoutError(f'layers must be tensors by name, such as {{"layer.0": tensor}}; got {type(layers)!r}')
        if not layers:
            raise LayoutError(f"layers must hold at least one KV-cache tensor by its name; got {layers!r}")
        if block_dim not in {None, 0, 1}:
            raise LayoutError(f"block_dim={block_dim!r}: pass block_dim=0, block_dim=1 or leave it out")
        by_name = {name: _layer_rows(name, layer, block_dim) for name, layer in layers.items()}
        first_name, first = next((name, rows[0]) for name, rows in by_name.items())
        for name, rows in by_name.items():
            for row in rows:
                if row.device != first.device:
                    raise LayoutError(
                        f"layer {first_name!r} is on {first.device!r}, layer {name!r} on {row.device!r}: "
                        "call from_layers once per device, with that device's layers only"
                    )
                if row.num_blocks != first.num_blocks:
                    raise LayoutError(
                        f"layer {first_name!r} has {first.num_blocks} blocks, layer {name!r} has {row.num_blocks} "
                        f"with block_dim={block_dim}: layers of one call share one block table; pass the block_dim "
                        "that counts blocks in all of them, or (K, V) tuples"
                    )
        index: dict[BlockTensor, int] = {}
        refs: list[list[CanonicalKVCacheRef]] = []
        for names in _checked_groups(layers, groups):
            group: dict[int, CanonicalKVCacheRef] = {}
            for row in (row for name in names for row in by_name[name]):
                tensor_idx = index.setdefault(row, len(index))
                group[tensor_idx] = CanonicalKVCacheRef(tensor_idx, row.row_bytes)
            refs.append(list(group.values()))
        return cls([CanonicalKVCacheTensor(row, row.row_bytes) for row in index], refs)


def torch_view(tensor: BlockTensor) -> TensorLike:
    """Return host memory as a torch int8 tensor of shape `(num_blocks, row_bytes)` that keeps the owner alive.

    Raises:
        LayoutError: The memory is not the host's.
    """
    if tensor.device != "cpu":
        raise LayoutError(f"only host memory can be viewed through its address, this is on {tensor.device!r}")
    import torch

    return torch.from_numpy(np.asarray(tensor))


def _layer_rows(name: str, layer: TensorLike, block_dim: int | None) -> list[BlockTensor]:
    what = f"layer {name!r}"
    if isinstance(layer, tuple | list):
        if len(layer) != 2:
            raise LayoutError(f"{what}: a tuple of {len(layer)}: pass one tensor, or a tuple (K, V)")
        return [row for part, kv in zip(layer, "KV", strict=True) for row in _split(part, f"{what} ({kv})", 0)]
    return _split(layer, what, _checked_block_dim(strided_memory(layer, what), what, block_dim))


def _checked_block_dim(memory: StridedMemory, what: str, block_dim: int | None) -> int:
    """Return the dimension that counts blocks, or refuse a shape that contradicts the call or leaves it open."""
    shape = memory.shape
    if len(shape) < 2:
        raise LayoutError(f"{what}: {memory.describe()}: expected (num_blocks, ...) or (2, num_blocks, ...)")
    if block_dim is None:
        if shape[0] <= 2:
            raise LayoutError(
                f"{what}: {memory.describe()} is ambiguous: pass block_dim=1 if dimension 0 holds K and V, "
                f"block_dim=0 if it counts {shape[0]} blocks"
            )
        return 0
    if block_dim == 1 and (shape[0] != 2 or len(shape) < 3):
        raise LayoutError(
            f"{what}: {memory.describe()}: block_dim=1 is for (2, num_blocks, ...), and dimension 0 has {shape[0]} "
            "entries: pass block_dim=0"
        )
    if block_dim == 0 and len(shape) == 5 and shape[0] == 2 and 2 not in shape[1:]:
        raise LayoutError(
            f"{what}: {memory.describe()}: only dimension 0 can hold K and V, so blocks are counted by dimension 1: "
            "pass block_dim=1"
        )
    return block_dim


def _split(tensor: TensorLike, what: str, block_dim: int) -> list[BlockTensor]:
    """Return the rows of one tensor: one block tensor if a block's bytes are dense, else one per entry of dim 0."""
    memory = strided_memory(tensor, what)
    dense = memory.dense_bytes(without=(block_dim,)) if memory.shape else None
    parts, row_bytes = 1, dense
    if dense is None and block_dim == 1:
        parts, row_bytes = memory.shape[0], memory.dense_bytes(without=(0, 1))
    overlap = row_bytes is not None and memory.shape[block_dim] > 1 and memory.strides[block_dim] < row_bytes
    if row_bytes is None or overlap:
        raise LayoutError(
            f"{what}: {memory.describe()}: the bytes of one block are not one dense range with block_dim={block_dim}: "
            "pass the tensor as the engine allocated it, not a slice or an expanded or transposed view, "
            f"with block_dim={1 - block_dim if _fits(memory, 1 - block_dim) else block_dim}, or a tuple (K, V)"
        )
    return [memory.rows(block_dim, row_bytes, part * memory.strides[0]) for part in range(parts)]


def _fits(memory: StridedMemory, block_dim: int) -> bool:
    """Return whether the other block_dim would be accepted, for the hint in a message."""
    if block_dim == 0:
        return memory.dense_bytes(without=(0,)) is not None
    return len(memory.shape) > 2 and memory.shape[0] == 2 and memory.dense_bytes(without=(0, 1)) is not None


def _checked_groups(layers: Mapping[str, TensorLike], groups: Sequence[Sequence[str]] | None) -> list[list[str]]:
    if groups is None:
        return [list(layers)]
    if not isinstance(groups, Sequence) or not all(isinstance(names, Sequence) for names in groups):
        raise LayoutError(f"groups must be a list of lists of layer names, one for each KV-cache group; got {groups!r}")
    named = [name for names in groups for name in names]
    unknown = [name for name in named if name not in layers]
    missing = [name for name in layers if name not in named]
    twice = sorted({name for name in named if named.count(name) > 1})
    if unknown or missing or twice or not all(groups):
        raise LayoutError(
            f"groups must name each layer once: unknown {unknown}, missing {missing}, named twice {twice}, "
            f"empty groups {[idx for idx, names in enumerate(groups) if not names]}"
        )
    return [list(names) for names in groups]
