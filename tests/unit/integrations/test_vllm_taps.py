from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

KEY = b"\x07" * 32 + b"\0\0\0\0"


@pytest.fixture
def taps(adapter):
    from kvoffload.integrations import vllm_taps

    vllm_taps.install_taps()
    vllm_taps.install_taps()  # changes nothing
    return vllm_taps


class Sink:
    def __init__(self):
        self.published = []

    def publish(self, events, infos):
        self.published += [(event.removed, event.keys, [infos.get(key) for key in event.keys]) for event in events]

    def describe(self, infos):
        pass


def request(**changes):
    values = {
        "request_id": "r", "block_hashes": [bytes([number]) * 32 for number in range(4)],
        "all_token_ids": list(range(100, 118)), "lora_request": None, "mm_features": [], "cache_salt": None,
        "prompt_embeds": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def stored_info(adapter, fake, taps, asked, key=None, end=16):
    from kvoffload.integrations.vllm_feed import OwnFeed

    sink = Sink()
    manager = adapter.KVOffloadManager(4, feed=OwnFeed(sink), tokens_per_hash=4)
    connector = fake.OffloadingConnector(manager=manager)
    connector.on_new_request(asked)
    key = key or asked.block_hashes[end // 4 - 1] + b"\0\0\0\0"
    context = fake.ReqContext("r")
    context._offload_key_positions = {key: end}
    output = manager.prepare_store([key], context)
    manager.complete_store(set(output.keys_to_store), context)
    ((removed, keys, (info,)),) = sink.published
    assert (removed, keys) == (False, [key])
    return info


def test_a_stored_block_is_described_from_its_request(adapter, fake, taps):
    info = stored_info(adapter, fake, taps, request())
    assert info.token_ids == tuple(range(108, 116))
    assert info.block_hashes == (b"\2" * 32, b"\3" * 32)
    assert info.parent_hash == b"\1" * 32
    assert (info.block_size, info.kind, info.extra_keys, info.salted) == (4, "full_attention", None, False)


def test_the_first_block_has_no_parent_and_carries_the_salt(adapter, fake, taps):
    info = stored_info(adapter, fake, taps, request(cache_salt="tenant"), end=8)
    assert info.parent_hash is None
    assert info.salted
    assert info.extra_keys == (("tenant",), None)


def test_a_lora_block_says_so(adapter, fake, taps):
    info = stored_info(adapter, fake, taps, request(lora_request=SimpleNamespace(lora_name="adapter")))
    assert info.lora_name == "adapter"
    assert info.extra_keys == (("adapter",), ("adapter",))


def test_a_block_that_ends_inside_an_offloaded_block_is_not_described(adapter, fake, taps):
    assert stored_info(adapter, fake, taps, request(), end=12) is None


def test_the_original_methods_still_run(adapter, fake, taps):
    connector = fake.OffloadingConnector(manager=adapter.KVOffloadManager(4))
    connector.on_new_request(request())
    assert connector.calls == [("on_new_request", "r")]


def test_connectors_of_others_are_left_alone(adapter, fake, taps):
    class Other:
        def get_finished(self):
            return [fake.TransferResult(3, True)]

    connector = fake.OffloadingConnector(manager=SimpleNamespace(), worker=Other())
    assert connector.get_transfer_results({"r"}) == fake.KVConnectorTransferResults(finished_recving={"r"})
    assert type(connector.build_connector_worker_meta()) is fake.OffloadingWorkerMetadata
    connector.on_new_request(request())


class FailingWorker:
    """Stands in for a worker on which one load and one store failed."""

    def get_finished(self):
        return []

    def take_failed_requests(self):
        return {"victim"}

    def take_failed_tickets(self):
        return {4, 5}


def test_failures_travel_from_the_worker_to_the_manager(adapter, fake, taps, monkeypatch):
    monkeypatch.setattr(taps, "KVOffloadWorker", FailingWorker)
    connector = fake.OffloadingConnector(worker=FailingWorker())
    assert connector.get_transfer_results({"victim", "fine"}).failed_recving == {"victim"}
    connector.done = {1: 1}
    meta = pickle.loads(pickle.dumps(connector.build_connector_worker_meta()))
    assert (meta.completed_jobs, meta.failed_tickets) == ({1: 1}, {4, 5})
    both = meta.aggregate(taps.KVOffloadWorkerMetadata({2: 1}, failed_tickets={9}))
    assert (both.completed_jobs, both.failed_tickets) == ({1: 1, 2: 1}, {4, 5, 9})

    manager = adapter.KVOffloadManager(4)
    context = fake.ReqContext("r")
    output = manager.prepare_store([KEY], context)
    meta.failed_tickets = {output.store_spec.ticket}
    scheduler = fake.OffloadingConnector(manager=manager)
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
    manager.complete_store({KEY}, context)
    assert manager.lookup(KEY, context) is fake.LookupResult.MISS
    assert scheduler.calls == [("update_connector_output", meta)]
