"""How the stores of one tick become one transfer: their blocks, group after group, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.jobs import QueuedStore
from kvoffload.transfer.base import HOST_VISIBLE, AllReady, Ready


def merge(offers: Sequence[QueuedStore]) -> tuple[GPULoadStoreSpec, list[int]]:
    """Return the GPU and CPU blocks of several offers, group after group."""
    if len(offers) == 1:
        return offers[0].gpu, [block for part in offers[0].cpu_block_ids for block in part]
    ids: list[int] = []
    cpu: list[int] = []
    sizes, indices = [], []
    for group_idx in range(len(offers[0].gpu.group_sizes)):
        size = 0
        for offer in offers:
            begin = sum(offer.gpu.group_sizes[:group_idx])
            count = offer.gpu.group_sizes[group_idx]
            ids += offer.gpu.block_ids[begin : begin + count].tolist()
            cpu += offer.cpu_block_ids[group_idx]
            size += count
        sizes.append(size)
        indices.append(0)
    return GPULoadStoreSpec(ids, sizes, indices), cpu


def all_ready(offers: Sequence[QueuedStore]) -> Ready:
    """Return what a merged transfer waits for."""
    events: list[Ready] = []
    for offer in offers:
        if not isinstance(offer.ready, str) and not any(offer.ready is event for event in events):
            events.append(offer.ready)
    if not events:
        return HOST_VISIBLE
    return events[0] if len(events) == 1 else AllReady(events)
