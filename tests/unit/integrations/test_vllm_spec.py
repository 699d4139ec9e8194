from __future__ import annotations

import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from kvoffload.errors import ConfigError


@pytest.fixture
def config(fake):
    def config(extra, *, sizes=(16,), world_size=1, chunks=1, block_bytes=1024, engine_feed=False, rank=0):
        return fake.OffloadingConfig(
            groups=tuple(SimpleNamespace(tokens_per_block=size) for size in sizes),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=engine_feed,
            extra_config={"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm"} | extra,
            engine_id="engine",
            model=SimpleNamespace(name="tiny"),
            cache=SimpleNamespace(tokens_per_hash=min(sizes), blocks_per_chunk=chunks),
            parallel=SimpleNamespace(world_size=world_size, data_parallel_index=rank),
            canonical_layout=False,
        )

    return config


def test_host_memory_is_shared_by_all_ranks(adapter, config):
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": "64KiB"}, world_size=2, chunks=4))
    assert spec.num_blocks == 64 * 1024 // (1024 * 2 * 4)
    assert spec.offload.block_size == 64
    assert (spec.offload.model_name, spec.offload.instance_id) == ("tiny", "engine")


def test_an_unknown_key_is_refused_with_the_nearest_one(adapter, config):
    with pytest.raises(ConfigError, match="eviction_polcy is no known key; did you mean eviction_policy"):
        adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "eviction_polcy": "arc"}))


def test_missing_memory_is_named(adapter, config):
    with pytest.raises(ConfigError, match="cpu_bytes_to_use is missing"):
        adapter.KVOffloadSpec(config({}))


def test_memory_for_less_than_one_block_is_refused(adapter, config):
    with pytest.raises(ConfigError, match="does not hold one offloaded block of 4096 bytes"):
        adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 4000}, chunks=4))


def test_what_vllm_decides_cannot_be_set(adapter, config):
    with pytest.raises(ConfigError, match="gpu_block_size cannot be set here"):
        adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "gpu_block_size": 16}))


@pytest.mark.parametrize("key", [{"enabled": False}, {"lease_seconds": 5}, {"pin_memory": "never"}])
def test_a_key_that_only_the_service_obeys_is_refused(adapter, config, key):
    with pytest.raises(ConfigError, match=f"{next(iter(key))} would have no effect in vLLM"):
        adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20} | key))


def test_events_without_any_key_are_this_ranks_and_not_the_only_feed_either(adapter, config):
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "events": {}}, engine_feed=True, rank=3))
    assert (spec.offload.events.sole_publisher, spec.offload.events.dp_rank) == (False, 3)


def test_groups_of_different_block_sizes_are_taken(adapter, config):
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20}, sizes=(16, 32), chunks=2))
    assert spec.offload.gpu_block_size == (16, 32)


def test_without_events_nothing_is_announced(adapter, config):
    assert adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20})).get_manager().feed is None


def test_with_the_engines_events_alone_vllm_publishes(adapter, config):
    from kvoffload.integrations.vllm_feed import VllmFeed

    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20}, engine_feed=True))
    assert isinstance(spec.get_manager().feed, VllmFeed)


def test_every_endpoint_of_a_feed_knows_the_rank_and_that_it_is_not_the_only_publisher(adapter, config):
    events = {"also": [{"endpoint": "tcp://*:5560", "replay_endpoint": None, "consumer": "aibrix"}]}
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "events": events}, rank=3, engine_feed=True))
    (other,) = spec.offload.events.also
    assert (other.sole_publisher, other.dp_rank) == (False, 3)


@pytest.mark.parametrize(
    ("engine_feed", "merge_from", "sole"),
    [(False, (), True), (True, (), False), (True, ("tcp://127.0.0.1:5557",), True)],
)
def test_a_feed_beside_the_engines_own_is_not_the_only_one(adapter, config, engine_feed, merge_from, sole):
    extra = {"cpu_bytes_to_use": 1 << 20, "events": {"merge_from": merge_from}}
    spec = adapter.KVOffloadSpec(config(extra, engine_feed=engine_feed, rank=3))
    assert spec.offload.events.sole_publisher is sole
    assert spec.offload.events.dp_rank == 3


def test_the_own_publisher_starts_with_the_manager_and_ends_with_it(adapter, config):
    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    manager = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "events": events})).get_manager()
    assert manager.wants_requests
    manager.shutdown()
    manager.shutdown()


def test_kvoffloads_own_metrics_are_served_from_the_engine_core(adapter, config, fake):
    extra = {"cpu_bytes_to_use": 1 << 20, "metrics_endpoint": "127.0.0.1:0"}
    spec = adapter.KVOffloadSpec(config(extra))
    manager = spec.get_manager()
    key = b"\1" * 32 + b"\0\0\0\0"
    context = fake.ReqContext("r")
    manager.complete_store(set(manager.prepare_store([key], context).keys_to_store), context)
    manager.get_stats()
    port = manager.on_shutdown[0].__self__.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    manager.shutdown()
    assert 'kvoffload_cache_blocks{engine="engine",model_name="tiny",state="ready"} 1.0' in text
    assert 'kvoffload_cache_capacity_blocks{engine="engine",model_name="tiny"} 1024.0' in text


def test_a_metrics_endpoint_that_is_none_is_refused(adapter, config):
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "metrics_endpoint": "9464"}))
    with pytest.raises(ConfigError, match=r"metrics_endpoint must be 'host:port', such as .*; got '9464'"):
        spec.get_manager()


def test_each_role_makes_its_half_once(adapter, config, fake):
    spec = adapter.KVOffloadSpec(config({"cpu_bytes_to_use": 1 << 20, "eviction_policy": "arc"}))
    assert spec.get_manager() is spec.get_manager()
    caches = fake.CanonicalKVCaches(
        tensors=[SimpleNamespace(tensor=np.zeros((4, 1024), np.int8), page_size_bytes=1024)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=1024)]],
    )
    worker = spec.get_worker(caches)
    assert worker is spec.get_worker(caches)
    worker.shutdown()
