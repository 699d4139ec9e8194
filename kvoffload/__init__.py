"""kvoffload moves KV-cache blocks between GPU and host memory inside async serving processes.

The public names are resolved on first use: `import kvoffload` loads neither torch nor zmq nor pydantic.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {
    "KVOffloadError": "kvoffload.errors",
    "UsageError": "kvoffload.errors",
    "LayoutError": "kvoffload.errors",
    "ConfigError": "kvoffload.errors",
    "UnsupportedError": "kvoffload.errors",
    "NoSpaceError": "kvoffload.errors",
    "TransferError": "kvoffload.errors",
    "ClosedError": "kvoffload.errors",
    "QuarantinedError": "kvoffload.errors",
    "UndrainedCopies": "kvoffload.errors",
    "OffloadKey": "kvoffload.keys",
    "BlockHash": "kvoffload.keys",
    "BlockInfo": "kvoffload.keys",
    "BlockChain": "kvoffload.chain",
    "GroupLayout": "kvoffload.chain",
    "hash_blocks": "kvoffload.keys",
    "make_offload_key": "kvoffload.keys",
    "get_offload_block_hash": "kvoffload.keys",
    "get_offload_group_idx": "kvoffload.keys",
    "OffloadConfig": "kvoffload.config",
    "EventsConfig": "kvoffload.config",
    "ReqContext": "kvoffload.manager.base",
    "RequestOutcome": "kvoffload.manager.base",
    "Match": "kvoffload.manager.base",
    "OffloadingEvent": "kvoffload.manager.base",
    "OffloadingManager": "kvoffload.manager.base",
    "PrepareStoreOutput": "kvoffload.manager.base",
    "ManagerStats": "kvoffload.manager.base",
    "LoadStoreSpec": "kvoffload.manager.specs",
    "BlockIDsLoadStoreSpec": "kvoffload.manager.specs",
    "GPULoadStoreSpec": "kvoffload.manager.specs",
    "CPULoadStoreSpec": "kvoffload.manager.specs",
    "CPUOffloadingManager": "kvoffload.manager.cpu",
    "FilterReusedOffloadingManager": "kvoffload.manager.reuse_filter",
    "BlockStatus": "kvoffload.manager.policies.base",
    "CachePolicy": "kvoffload.manager.policies.base",
    "LRUCachePolicy": "kvoffload.manager.policies.lru",
    "ARCCachePolicy": "kvoffload.manager.policies.arc",
    "register_policy": "kvoffload.manager.policies.registry",
    "CanonicalKVCacheTensor": "kvoffload.memory.canonical",
    "CanonicalKVCacheRef": "kvoffload.memory.canonical",
    "CanonicalKVCaches": "kvoffload.memory.canonical",
    "SharedOffloadRegion": "kvoffload.memory.region",
    "OffloadingHandler": "kvoffload.transfer.base",
    "TransferResult": "kvoffload.transfer.base",
    "TransferSpec": "kvoffload.transfer.base",
    "OffloadingWorker": "kvoffload.transfer.worker",
    "SingleDirectionOffloadingHandler": "kvoffload.transfer.directional",
    "CpuGpuOffloadingHandlers": "kvoffload.transfer.directional",
    "compute_sub_block_ptrs": "kvoffload.transfer.plan",
    "OffloadingSpec": "kvoffload.spec.base",
    "OffloadingSpecFactory": "kvoffload.spec.factory",
    "CPUOffloadingSpec": "kvoffload.spec.cpu",
    "OffloadEngine": "kvoffload.service.engine",
    "RemoteWorkers": "kvoffload.service.ranks.remote",
    "OffloadRankWorker": "kvoffload.service.ranks.rank_worker",
    "OffloadService": "kvoffload.service.service",
    "OffloadRequest": "kvoffload.service.request",
    "StoreJob": "kvoffload.service.store_job",
    "Lease": "kvoffload.service.lease",
    "Stats": "kvoffload.service.results",
    "BlockReport": "kvoffload.service.results",
    "LoadResult": "kvoffload.service.results",
    "LoadOutcome": "kvoffload.service.results",
    "StoreResult": "kvoffload.service.results",
    "PrefixMatch": "kvoffload.service.results",
    "JobDone": "kvoffload.service.results",
    "Health": "kvoffload.service.results",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 - the table is the list


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kvoffload' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
