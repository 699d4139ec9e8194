"""The few names of vLLM 0.32 that the adapter uses, as small as they can be, so that it can be tested without vLLM.

The real ones are met in `tests/integration/test_vllm_engine.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

VERSION = "0.32.0"


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class Medium(enum.Enum):
    CPU = "CPU"


class CacheHitSource(enum.Enum):
    HOST = "host"


class TierFilter:
    def __init__(self, cpu):
        self.cpu = cpu

    def allows(self, medium, locality):
        return self.cpu


TierFilter.ALL = TierFilter(True)


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict | None = None
    load_tier_filter: object = TierFilter.ALL
    states: dict = field(default_factory=dict, init=False)
    _offload_key_positions: dict = field(default_factory=dict, init=False)

    def set_state(self, value):
        self.states[type(value)] = value

    def get_state(self, cls):
        return self.states.get(cls)

    def get_offload_key_position(self, key):
        return self._offload_key_positions.get(key)


class RequestOffloadingContext:
    pass


class ScheduleEndContext:
    pass


@dataclass
class PrepareStoreOutput:
    keys_to_store: list
    store_spec: object
    evicted_keys: list


@dataclass
class OffloadingEvent:
    keys: list
    medium: Medium
    removed: bool


@dataclass
class OffloadingCounterMetadata:
    documentation: str


class OffloadingGaugeMetadata(OffloadingCounterMetadata):
    pass


class OffloadingHistogramMetadata(OffloadingCounterMetadata):
    pass


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingManager:
    pass


class OffloadingWorker:
    pass


class CanonicalKVCaches(SimpleNamespace):
    pass


class GPULoadStoreSpec(SimpleNamespace):
    pass


class OffloadingConfig(SimpleNamespace):
    pass


class OffloadingSpec:
    def __init__(self, config):
        self.config = config
        self.tokens_per_hash = config.cache.tokens_per_hash
        self.blocks_per_chunk = config.cache.blocks_per_chunk


def generate_block_hash_extra_keys(request, start, end, start_mm):
    lora = [("lora", request.lora_request.lora_name, "path")] if request.lora_request else []
    salt = [("cache_salt", request.cache_salt)] if request.cache_salt and start == 0 else []
    return (tuple(lora + salt) or None), start_mm


def to_event_extra_keys(extra_keys):
    return [None if keys is None else tuple(key[1] for key in keys) for keys in extra_keys]


def resolve_block_hashes(hashes, per_hash, per_block):
    step = per_block // per_hash
    return hashes[step - 1 :: step]


@dataclass
class KVConnectorTransferResults:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: dict = field(default_factory=dict)
    transfer_stats: object = None

    def aggregate(self, other):
        return OffloadingWorkerMetadata({**self.completed_jobs, **other.completed_jobs})


class OffloadingConnectorStats:
    def __init__(self):
        self.gauges, self.counters = {}, {}

    def set_gauge(self, name, value):
        self.gauges[name] = value

    def increase_counter(self, name, value):
        self.counters[name] = self.counters.get(name, 0) + value


class OffloadingEventGroupSpec(NamedTuple):
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class GroupOffloadConfig(NamedTuple):
    group_idx: int
    tokens_per_block: int
    tokens_per_chunk: int
    kv_event_group_spec: OffloadingEventGroupSpec


class SchedulerOffloadConfig(NamedTuple):
    kv_group_configs: tuple[GroupOffloadConfig, ...]


class OffloadingConnectorScheduler:
    def __init__(self, manager, config):
        self.manager = manager
        self.config = config


class OffloadingConnectorWorker:
    def __init__(self, worker):
        self.worker = worker


class OffloadingConnector:
    """vLLM's connector as far as the wrapped methods go; `calls` says what reached it."""

    def __init__(self, manager=None, worker=None):
        self.calls = []
        self.connector_scheduler = None
        self.connector_worker = None
        if manager is not None:
            group = GroupOffloadConfig(0, 4, 8, OffloadingEventGroupSpec("full_attention", None))
            self.connector_scheduler = OffloadingConnectorScheduler(manager, SchedulerOffloadConfig((group,)))
        if worker is not None:
            self.connector_worker = OffloadingConnectorWorker(worker)

    def on_new_request(self, request):
        self.calls.append(("on_new_request", request.request_id))

    def get_transfer_results(self, finished_req_ids):
        done = self.connector_worker.worker.get_finished()
        self.done = {result.job_id: 1 for result in done}
        return KVConnectorTransferResults(finished_recving=set(finished_req_ids))

    def build_connector_worker_meta(self):
        return OffloadingWorkerMetadata(self.done) if self.done else None

    def update_connector_output(self, connector_output):
        self.calls.append(("update_connector_output", connector_output.kv_connector_worker_meta))
