"""`BlockTensor`: rows of bytes at an address, which is all that the copy code needs to know of a tensor.

A KV cache is a torch tensor, a numpy array, or a mapped file. Each is described once by base address, row stride and
row bytes; no library is imported for it: torch tensors are recognised by their methods, everything else by the array
interface protocols.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvoffload.errors import LayoutError

TensorLike: TypeAlias = Any
"""A torch tensor, a numpy array, a `BlockTensor`, or an object with an array interface."""

_NUMERIC = "biufcV"
"""Kinds of the array interface whose size in bytes stands in the type string."""


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """`num_blocks` rows of `row_bytes` bytes, `row_stride_bytes` apart, in the memory of one device.

    On the CPU, `numpy.asarray(block_tensor)` is its int8 array of shape `(num_blocks, row_bytes)`, which keeps the
    owner alive.

    Attributes:
        base_address: Address of the first byte of row 0.
        num_blocks: Rows.
        row_stride_bytes: Bytes from one row's start to the next one's.
        row_bytes: Bytes in a row that belong to this tensor.
        device: `"cpu"`, or a torch-like device name such as `"cuda:0"`.
        owner: Whatever must stay alive while the address is used.
    """

    base_address: int
    num_blocks: int
    row_stride_bytes: int
    row_bytes: int
    device: str = "cpu"
    owner: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.base_address <= 0 or self.num_blocks < 1 or self.row_bytes < 1:
            raise LayoutError(
                f"not a block tensor: {self!r}: it needs an address, at least one block and one byte a row"
            )
        if self.num_blocks > 1 and self.row_stride_bytes < self.row_bytes:
            raise LayoutError(f"rows overlap in {self!r}: row_stride_bytes must be at least row_bytes")

    @property
    def span_bytes(self) -> int:
        """Bytes from the first byte of the first row to the last byte of the last."""
        return (self.num_blocks - 1) * self.row_stride_bytes + self.row_bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device != "cpu":
            raise AttributeError(f"memory of {self.device} cannot be read as a numpy array")
        return {
            "version": 3,
            "typestr": "|i1",
            "shape": (self.num_blocks, self.row_bytes),
            "strides": (self.row_stride_bytes, 1),
            "data": (self.base_address, False),
        }


@dataclass(frozen=True, slots=True)
class StridedMemory:
    """What an array-like object says about its memory: address, shape, strides in bytes, item size, device."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str
    owner: Any

    def describe(self) -> str:
        """Return shape and stride for a message, strides in elements as torch counts them."""
        return f"shape {self.shape}, stride {tuple(stride // self.itemsize for stride in self.strides)}"

    def dense_bytes(self, without: tuple[int, ...]) -> int | None:
        """Return the bytes that the other dimensions span if they are one dense range, in any order, else None."""
        expected = self.itemsize
        inner = [(self.strides[d], n) for d, n in enumerate(self.shape) if d not in without and n != 1]
        for stride, size in sorted(inner):
            if stride != expected:
                return None
            expected *= size
        return expected

    def rows(self, block_dim: int, row_bytes: int, offset: int = 0) -> BlockTensor:
        """Return the blocks counted by `block_dim`, each `row_bytes` long, starting `offset` bytes in."""
        num_blocks = self.shape[block_dim]
        stride = self.strides[block_dim] if num_blocks > 1 else row_bytes
        return BlockTensor(self.address + offset, num_blocks, stride, row_bytes, self.device, self.owner)


def strided_memory(tensor: TensorLike, what: str = "tensor") -> StridedMemory:
    """Describe the memory of a torch tensor, a numpy array, a `BlockTensor`, or an array-interface object.

    Raises:
        LayoutError: The object has no memory that can be read and written in place.
    """
    if isinstance(tensor, BlockTensor):
        shape = (tensor.num_blocks, tensor.row_bytes)
        return StridedMemory(tensor.base_address, shape, (tensor.row_stride_bytes, 1), 1, tensor.device, tensor.owner)
    if callable(getattr(tensor, "data_ptr", None)) and callable(getattr(tensor, "element_size", None)):
        itemsize = int(tensor.element_size())
        try:
            address = int(tensor.data_ptr())
            strides = tuple(int(stride) * itemsize for stride in tensor.stride())
        except RuntimeError as error:
            raise LayoutError(f"{what}: {type(tensor).__name__} without plain memory: {error}") from error
        memory = StridedMemory(address, tuple(map(int, tensor.shape)), strides, itemsize, str(tensor.device), tensor)
    else:
        interface = getattr(tensor, "__array_interface__", None)
        device = "cpu"
        if interface is None:
            interface = getattr(tensor, "__cuda_array_interface__", None)
            device = f"cuda:{getattr(getattr(tensor, 'device', None), 'id', 0)}"
        if interface is None or interface["typestr"][1] not in _NUMERIC:
            raise LayoutError(
                f"{what}: {type(tensor).__name__} is not a tensor of numbers: pass a torch tensor, a numpy array, or "
                "a BlockTensor"
            )
        address, read_only = interface["data"]
        if read_only:
            raise LayoutError(f"{what}: the array is read-only; blocks are loaded into it: pass a writable array")
        shape = tuple(interface["shape"])
        itemsize = int(interface["typestr"][2:])
        strides = interface.get("strides") or _dense_strides(shape, itemsize)
        memory = StridedMemory(address, shape, tuple(strides), itemsize, device, tensor)
    if memory.address == 0 or math.prod(memory.shape) == 0:
        raise LayoutError(f"{what}: {memory.describe()} on {memory.device!r} has no memory behind it")
    return memory


def as_block_tensor(tensor: TensorLike, what: str = "tensor") -> BlockTensor:
    """Return the rows of a tensor whose first dimension counts blocks.

    Raises:
        LayoutError: The rest of the dimensions is not one dense range of bytes.
    """
    if isinstance(tensor, BlockTensor):
        return tensor
    memory = strided_memory(tensor, what)
    row_bytes = memory.dense_bytes(without=(0,)) if memory.shape else None
    if row_bytes is None:
        raise LayoutError(f"{what}: {memory.describe()}: each row of dimension 0 must be one dense range of bytes")
    return memory.rows(0, row_bytes)


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))
