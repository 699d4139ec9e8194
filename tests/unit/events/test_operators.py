"""What an operator of several feeds, slots and consumers is told, and what registrations touch."""

import argparse
import re
import time
from pathlib import Path

import pytest
from feedkit import BLOCK, Reader, chain, names, publisher, removed, stored

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.cli import feed_verify
from kvoffload.config import EventsConfig
from kvoffload.errors import ConfigError
from kvoffload.events import publisher as publisher_module
from kvoffload.events import verify
from kvoffload.events.register import DynamoIndexer
from kvoffload.events.replay import snapshot_payloads
from kvoffload.events.settings import resolve
from kvoffload.events.verify import diagnose, probes
from kvoffload.events.wire import BlockRemoved, decode_batch
from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager

QUIET = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": None, "start_announcement": False}


class Indexer(DynamoIndexer):
    """Answers as Dynamo does, without a socket; `/unregister` removes every slot of an instance."""

    def __init__(self, *slots):
        super().__init__("http://indexer")
        self.slots, self.unregistered = set(slots), 0

    def _call(self, path, body=None):
        if path == "/workers":
            return [{"instance_id": 7, "model_name": "m", "endpoints": dict.fromkeys(self.slots, "tcp://e")}]
        if path == "/unregister":
            self.unregistered += 1
            self.slots.clear()
        else:
            self.slots.add(str(body["dp_rank"]))
        return None


@pytest.mark.parametrize(("before", "unregistered"), [({"0"}, 0), (set(), 1), ({"1"}, 1)])
def test_a_free_slot_is_taken_without_touching_the_engines_own(before, unregistered):
    indexer = Indexer(*before)
    indexer.register({"instance_id": 7, "model_name": "m", "dp_rank": 1})
    assert indexer.slots == before | {"1"}
    assert indexer.unregistered == unregistered


def test_registering_a_taken_slot_says_which_others_must_register_again(caplog):
    indexer = Indexer("0", "1")
    indexer.register({"instance_id": 7, "model_name": "m", "dp_rank": 1})
    assert "slot 0 of instance 7 is no longer registered" in caplog.text


def test_only_the_feed_meant_for_dynamo_registers_with_it(monkeypatch):
    seen = []

    class Registration:
        def __init__(self, url, bodies):
            seen.extend(bodies)

        def start(self): ...

        def stop(self, *_): ...

        close = stop

    monkeypatch.setattr(publisher_module, "AutoRegistration", Registration)
    with publisher(
        model_name="m", consumer=["dynamo"], indexer="http://127.0.0.1:9", also=[{**QUIET, "consumer": "aibrix"}]
    ) as feed:
        assert [body["endpoint"] for body in seen] == [feed.endpoints[0]]


def test_a_snapshots_dead_parent_is_not_expected_of_the_consumer():
    blocks = chain(1, 3)
    with publisher() as feed:
        feed.publish(*stored(blocks))
        feed.publish(*removed(blocks, 0, 1))
        assert feed.flush()
        lane = feed.lanes[0]
        with lane.lock:
            cut = lane.journal.cut(lane.journal.first)
        assert probes(list(snapshot_payloads(cut, lane)), 5)[0] == []


def test_a_silent_lane_beats_while_another_is_busy():
    with publisher(also=[{**QUIET, "media": ["GPU"]}], heartbeat_seconds=0.05) as feed:
        silent, seed = feed.lanes[1].journal, 0
        before = silent.next
        deadline = time.monotonic() + 10
        while silent.next < before + 3 and time.monotonic() < deadline:
            seed += 1
            feed.publish(*stored(chain(seed, 1)))
            time.sleep(0.01)
        assert silent.next >= before + 3


@pytest.mark.parametrize("consumer", ["llm-d", "vllm-router"])
def test_a_consumer_that_stops_at_a_hole_is_not_given_a_relaxed_feed(consumer):
    with publisher() as feed:
        description = feed._describe_lane(feed.lanes[0])
        assert "contiguity" in {finding.name for finding in diagnose(description, consumer=consumer)}
        strict = {**description, "contiguity": "strict"}
        assert "contiguity" not in {finding.name for finding in diagnose(strict, consumer=consumer)}


def test_a_setting_that_has_no_effect_on_one_lane_is_refused():
    config = EventsConfig(endpoint="tcp://*:5557", also=[{**QUIET, "heartbeat_seconds": 2.0}])
    with pytest.raises(ConfigError, match="heartbeat_seconds below `also` would have no effect"):
        resolve(config, model_name="m", instance_id="pod")


def test_the_instance_behind_a_wildcard_is_found_by_the_host_that_was_asked():
    args = argparse.Namespace(instance=None, replay="tcp://10.0.0.7:5558")
    workers = [{"instance_id": 7, "endpoints": {"0": "tcp://10.0.0.7:5557"}}]
    assert feed_verify._instance(args, {"endpoint": "tcp://0.0.0.0:5557"}, workers) == 7


def test_lookups_are_silent_and_a_reset_of_the_manager_empties_the_consumer_within_a_second():
    """A-E4, with the manager's own events."""
    blocks = chain(1, 200)
    keys = list(blocks.keys())
    manager, context = CPUOffloadingManager(256, enable_events=True), ReqContext()
    with publisher(batch_window_seconds=0.05) as feed, Reader(feed) as reader:
        output = manager.prepare_store(keys, context)
        manager.complete_store(output.keys_to_store, ticket=output.ticket)
        feed.publish(manager.take_events(), {key: blocks.info(i) for i, key in enumerate(keys)})
        (event, *rest) = decode_batch(reader.next()[2]).events
        assert {name for each in (event, *rest) for name in each.block_hashes} == {n for _, n in names(blocks)}
        for key in keys[:100]:
            assert manager.lookup(key, context) is True
        feed.publish(manager.take_events(), {})
        assert reader.silent(0.2)
        before = time.monotonic()
        manager.reset_cache()
        feed.publish(manager.take_events(), {})
        gone = list(decode_batch(reader.next(1.0)[2]).events)
        assert time.monotonic() - before < 1.0
        assert all(isinstance(each, BlockRemoved) and each.medium == "CPU" for each in gone)
        assert {name for each in gone for name in each.block_hashes} == {n for _, n in names(blocks)}


def verified(feed, *arguments):
    """Return what `feed verify` says of a feed, asked without an indexer's answers."""
    parser = argparse.ArgumentParser()
    feed_verify.add_arguments(parser)
    return feed_verify.verify(parser.parse_args(["--replay", feed.replay_endpoints[0], *arguments]))


def test_blocks_without_tokens_are_a_finding():
    with publisher() as feed:
        blocks = BlockChain([GroupLayout(BLOCK)], block_hashes=[bytes([i]) * 32 for i in range(3)])
        feed.publish(*stored(blocks))
        assert feed.flush()
        findings = verified(feed)["findings"]
    assert [finding["name"] for finding in findings] == ["tokens"]
    assert "3 blocks" in findings[0]["text"]


def test_a_cache_of_salted_chains_alone_is_a_finding_and_not_ok():
    """Otherwise 0 of 0 tokens would look like success."""
    with publisher() as feed:
        feed.publish(*stored(chain(1, 3, cache_salt="tenant")))
        assert feed.flush()
        result = verified(feed)
    assert [finding["name"] for finding in result["findings"]] == ["salt"]
    assert (result["ok"], result["prefixes"]) == (False, 0)


DESCRIBED = {
    "endpoint": "tcp://0.0.0.0:5557", "model_name": "m", "block_size": 16, "encoding": "map", "topic": "",
    "hash_mode": "uint64", "contiguity": "relaxed", "withheld": {},
}  # fmt: skip


def test_an_unregistered_feed_is_told_apart_from_a_wrong_port():
    assert [f.name for f in diagnose(DESCRIBED, consumer="dynamo", workers=[])] == ["registration"]
    elsewhere = [{"instance_id": 1, "model_name": "m", "endpoints": {"0": "tcp://h:9999"}}]
    assert [f.name for f in diagnose(DESCRIBED, consumer="dynamo", workers=elsewhere)] == ["port"]


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({"instance": 2, "host": "10.0.0.9"}, []),
        ({"host": "10.0.0.2"}, []),
        ({"instance": 1, "host": "10.0.0.9"}, ["block size"]),
        ({"host": "10.0.0.9"}, ["port"]),
        ({}, ["block size"]),
    ],
)
def test_registrations_of_several_hosts_with_one_port_are_told_apart(known, found):
    workers = [
        {"instance_id": 1, "model_name": "m", "block_size": 64, "endpoints": {"0": "tcp://10.0.0.1:5557"}},
        {"instance_id": 2, "model_name": "m", "block_size": 16, "endpoints": {"0": "tcp://10.0.0.2:5557"}},
    ]
    findings = diagnose(DESCRIBED, consumer="dynamo", workers=workers, **known)
    assert [finding.name for finding in findings] == found
    if found == ["port"]:
        assert "tcp://10.0.0.9:5557" in findings[0].text
        assert "tcp://10.0.0.1:5557, tcp://10.0.0.2:5557" in findings[0].text


def test_a_single_registration_is_taken_by_its_port_since_hosts_have_many_names():
    workers = [{"instance_id": 1, "model_name": "m", "block_size": 16, "endpoints": {"0": "tcp://pod-7.local:5557"}}]
    assert diagnose(DESCRIBED, consumer="dynamo", workers=workers, instance=9, host="10.0.0.7") == []


def test_a_clock_that_went_back_is_named_where_numbers_begin_at_it():
    workers = [{"instance_id": 1, "model_name": "m", "block_size": 16, "endpoints": {"0": "tcp://h:5557"}}]
    for start, named in (("epoch", True), ("zero", False)):
        described = DESCRIBED | {"sequence_start": start, "replay_endpoint": "tcp://h:5558"}
        (finding,) = diagnose(described, consumer="vllm", workers=workers, missing=True)
        assert ("clock set back" in finding.text) is named


def test_the_guide_names_every_reason_that_verify_gives():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "no-cpu-hits.md").read_text()
    sources = [Path(verify.__file__).read_text(), Path(feed_verify.__file__).read_text()]
    reasons = {name for text in sources for name in re.findall(r'Finding\(\s*"([^"]+)"', text)}
    assert len(reasons) > 8
    assert {reason for reason in reasons if f"| `{reason}` |" not in guide} == set()
