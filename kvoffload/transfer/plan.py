"""The arithmetic of one transfer: which bytes go where. Reference, chapters 7.1 and 7.3; no byte moves here.

An offloaded block is one row of each CPU tensor and holds `factor` engine blocks side by side. A transfer names engine
blocks (group after group) and the offloaded blocks that cover them; per group the first `block_indices[g] % factor`
places of the first offloaded block are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import LayoutError, UsageError
from kvoffload.manager.specs import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from kvoffload.memory.block_tensor import BlockTensor, TensorLike, as_block_tensor
from kvoffload.memory.canonical import CanonicalKVCacheRef

Int64Array = npt.NDArray[np.int64]


def compute_sub_block_ptrs(
    block_ids: Int64Array, block_size_factor: int, output: Int64Array, tensor: TensorLike, skip_count: int = 0
) -> None:
    """Write the address of each sub-block into `output`, as many as it has room for.

    Sub-block j of block b is at `base + b * row_stride + j * (row_bytes / factor)`.

    Args:
        block_ids: Rows of the tensor, int64.
        block_size_factor: Sub-blocks in a row.
        output: int64 array of the wanted length; the only thing changed.
        tensor: Torch tensor, numpy array or `BlockTensor` whose dimension 0 counts blocks.
        skip_count: Sub-blocks of the first row that are left out, less than the factor.

    Raises:
        UsageError: The blocks do not hold that many sub-blocks, or the row is not a multiple of the factor.
    """
    view = as_block_tensor(tensor)
    if block_size_factor < 1 or not 0 <= skip_count < block_size_factor:
        raise UsageError(f"skip_count {skip_count} must be in 0..{block_size_factor - 1} (factor {block_size_factor})")
    if view.row_bytes % block_size_factor:
        raise UsageError(f"rows of {view.row_bytes} bytes cannot be cut in {block_size_factor} sub-blocks")
    count = len(output)
    if len(block_ids) * block_size_factor < skip_count + count:
        raise UsageError(
            f"{len(block_ids)} blocks of {block_size_factor} sub-blocks cannot give {count} after skipping {skip_count}"
        )
    if block_size_factor == 1:
        np.multiply(block_ids[:count], view.row_stride_bytes, out=output)
        output += view.base_address
        return
    sub_offsets = np.arange(block_size_factor, dtype=np.int64) * (view.row_bytes // block_size_factor)
    rows = view.base_address + np.asarray(block_ids, dtype=np.int64) * view.row_stride_bytes
    output[:] = (rows[:, np.newaxis] + sub_offsets).ravel()[skip_count : skip_count + count]


class Descriptors(NamedTuple):
    """Copies to make: `sizes[i]` bytes from address `src[i]` to address `dst[i]`."""

    src: Int64Array
    dst: Int64Array
    sizes: Int64Array


def coalesce(descriptors: Descriptors) -> Descriptors:
    """Join neighbours whose bytes follow each other on both sides."""
    src, dst, sizes = descriptors
    if len(src) < 2:
        return descriptors
    breaks = (src[1:] != src[:-1] + sizes[:-1]) | (dst[1:] != dst[:-1] + sizes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(starts) == len(src):
        return descriptors
    return Descriptors(src[starts], dst[starts], np.add.reduceat(sizes, starts))


def equal_stride_runs(descriptors: Descriptors, min_length: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` of runs with one size and one stride on each side: each is a 2-D copy.

    Rows of a run never overlap. Runs are disjoint and ascending; what lies between them has to be copied one by one.
    """
    src, dst, sizes = descriptors
    if len(src) < min_length:
        return []
    src_step, dst_step = np.diff(src), np.diff(dst)
    fits = (sizes[1:] == sizes[:-1]) & (np.abs(src_step) >= sizes[1:]) & (np.abs(dst_step) >= sizes[1:])
    goes_on = fits[1:] & fits[:-1] & (src_step[1:] == src_step[:-1]) & (dst_step[1:] == dst_step[:-1])
    if not goes_on.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], goes_on, [False])).astype(np.int8)))
    runs: list[tuple[int, int]] = []
    last_stop = 0
    for begin, end in edges.reshape(-1, 2).tolist():
        start = max(begin, last_stop)  # two runs can share one descriptor: it stays with the first
        if end + 2 - start >= min_length:
            runs.append((start, end + 2))
            last_stop = end + 2
    return runs


class _GroupPart(NamedTuple):
    refs: Sequence[CanonicalKVCacheRef]
    gpu_ids: Int64Array
    cpu_ids: Int64Array
    skip: int


class TransferLayout:
    """The two sides of all transfers: GPU tensors, CPU tensors, the factor between them, and the groups.

    Attributes:
        num_gpu_blocks: Engine blocks.
        num_cpu_blocks: Offloaded blocks.
        block_size_factor: Engine blocks in an offloaded block.

    Raises:
        LayoutError: The CPU rows are not `factor` GPU rows long, or counts differ.
    """

    def __init__(
        self,
        gpu_tensors: Sequence[TensorLike],
        cpu_tensors: Sequence[TensorLike],
        block_size_factor: int,
        kv_cache_groups_data_refs: Sequence[Sequence[CanonicalKVCacheRef]],
    ) -> None:
        if block_size_factor < 1:
            raise LayoutError(f"block_size_factor must be at least 1, got {block_size_factor}")
        self.gpu: list[BlockTensor] = [as_block_tensor(t, f"GPU tensor {i}") for i, t in enumerate(gpu_tensors)]
        self.cpu: list[BlockTensor] = [as_block_tensor(t, f"CPU tensor {i}") for i, t in enumerate(cpu_tensors)]
        self.block_size_factor = block_size_factor
        self.group_refs = tuple(tuple(refs) for refs in kv_cache_groups_data_refs)
        if not self.gpu or len(self.gpu) != len(self.cpu):
            raise LayoutError(f"cpu_tensors must be one for each of {len(self.gpu)} GPU tensors; got {len(self.cpu)}")
        for idx, (gpu, cpu) in enumerate(zip(self.gpu, self.cpu, strict=True)):
            if cpu.row_bytes != gpu.row_bytes * block_size_factor:
                raise LayoutError(
                    f"CPU tensor {idx} has rows of {cpu.row_bytes} bytes: factor {block_size_factor} times "
                    f"{gpu.row_bytes} bytes of the GPU tensor is {gpu.row_bytes * block_size_factor}"
                )
            if cpu.device != "cpu":
                raise LayoutError(f"CPU tensors must be host memory; got tensor {idx} on {cpu.device!r}")
            if gpu.device != self.gpu[0].device:
                raise LayoutError(
                    f"GPU tensors must be on one device; {idx} is on {gpu.device!r}, 0 on {self.gpu[0].device!r}"
                )
        if {ref.tensor_idx for refs in self.group_refs for ref in refs} - set(range(len(self.gpu))):
            raise LayoutError(f"kv_cache_groups_data_refs name tensors outside 0..{len(self.gpu) - 1}")
        self.num_gpu_blocks = min(tensor.num_blocks for tensor in self.gpu)
        self.num_cpu_blocks = min(tensor.num_blocks for tensor in self.cpu)

    def plan(self, src: LoadStoreSpec, dst: LoadStoreSpec, *, gpu_to_cpu: bool) -> CopyPlan:
        """Check a transfer against the layout and return its plan; the specs' arrays are copied.

        Raises:
            UsageError: Wrong media, a block id out of range, or sizes that do not fit; nothing happened.
        """
        gpu, cpu = (src, dst) if gpu_to_cpu else (dst, src)
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, BlockIDsLoadStoreSpec) or cpu.medium() != "CPU":
            wanted = "GPU to CPU" if gpu_to_cpu else "CPU to GPU"
            raise UsageError(f"this handler moves {wanted}, got {src.medium()} to {dst.medium()}")
        if len(gpu.group_sizes) != len(self.group_refs):
            raise UsageError(f"the spec has {len(gpu.group_sizes)} groups, the KV caches have {len(self.group_refs)}")
        gpu_ids, cpu_ids = gpu.block_ids.copy(), cpu.block_ids.copy()
        for name, ids, limit in (("GPU", gpu_ids, self.num_gpu_blocks), ("CPU", cpu_ids, self.num_cpu_blocks)):
            if len(ids) and (int(ids.max()) >= limit or int(ids.min()) < 0):
                bad = ids[(ids >= limit) | (ids < 0)][:4].tolist()
                raise UsageError(f"{name} block ids {bad} are out of range: there are {limit} blocks")
        factor = self.block_size_factor
        parts: list[_GroupPart] = []
        gpu_at = cpu_at = num_bytes = 0
        for size, index, refs in zip(gpu.group_sizes, gpu.block_indices, self.group_refs, strict=True):
            if size == 0:
                continue
            skip = index % factor
            rows = -(-(skip + size) // factor)
            parts.append(_GroupPart(refs, gpu_ids[gpu_at : gpu_at + size], cpu_ids[cpu_at : cpu_at + rows], skip))
            gpu_at += size
            cpu_at += rows
            num_bytes += size * sum(ref.page_size_bytes for ref in refs)
        if cpu_at != len(cpu_ids):
            raise UsageError(
                f"{len(gpu_ids)} GPU blocks at indices {list(gpu.block_indices)} (group sizes {list(gpu.group_sizes)}, "
                f"factor {factor}) need {cpu_at} CPU blocks, got {len(cpu_ids)}"
            )
        return CopyPlan(self, gpu_to_cpu, gpu_ids, tuple(parts), num_bytes)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One checked transfer.

    Attributes:
        layout: Both sides; keeps their memory alive.
        gpu_to_cpu: Direction.
        gpu_blocks: Every engine block that is read or written.
        parts: Per group with blocks: references, ids of both sides, places skipped.
        num_bytes: Bytes to copy.
    """

    layout: TransferLayout
    gpu_to_cpu: bool
    gpu_blocks: Int64Array
    parts: tuple[_GroupPart, ...]
    num_bytes: int

    def segments(self) -> Iterator[Descriptors]:
        """Yield the copies of one group and tensor at a time, in order, not coalesced."""
        for part in self.parts:
            count = len(part.gpu_ids)
            for ref in part.refs:
                gpu_ptrs, cpu_ptrs = np.empty(count, np.int64), np.empty(count, np.int64)
                compute_sub_block_ptrs(part.gpu_ids, 1, gpu_ptrs, self.layout.gpu[ref.tensor_idx])
                factor, cpu = self.layout.block_size_factor, self.layout.cpu[ref.tensor_idx]
                compute_sub_block_ptrs(part.cpu_ids, factor, cpu_ptrs, cpu, skip_count=part.skip)
                src, dst = (gpu_ptrs, cpu_ptrs) if self.gpu_to_cpu else (cpu_ptrs, gpu_ptrs)
                yield Descriptors(src, dst, np.full(count, ref.page_size_bytes, np.int64))

    def descriptors(self) -> Descriptors:
        """Return all copies as three arrays, as the reference's `transfer_async` builds them."""
        segments = list(self.segments())
        if not segments:
            empty = np.empty(0, np.int64)
            return Descriptors(empty, empty, empty)
        return Descriptors(*(np.concatenate(column) for column in zip(*segments, strict=True)))
