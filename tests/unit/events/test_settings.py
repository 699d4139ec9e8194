"""Presets, topics and the ports of ranks."""

from __future__ import annotations

import pytest

from kvoffload.config import EventsConfig
from kvoffload.errors import ConfigError
from kvoffload.events.settings import check_ports, is_loopback, rank_endpoint, resolve


def settings(**options):
    return resolve(EventsConfig(**options), model_name="org/model", instance_id="pod")


def test_ports_of_ranks_may_not_overlap():
    """A-E7."""
    with pytest.raises(ConfigError, match=r"5557.*5558.*overlap with 2 ranks"):
        check_ports("tcp://*:5557", "tcp://*:5558", 2)
    check_ports("tcp://*:5557", "tcp://*:5559", 2)
    check_ports("tcp://*:0", "tcp://*:0", 8)
    with pytest.raises(ConfigError):
        settings(ranks=4, dp_rank=1)


def test_a_ranks_endpoint_is_shifted_or_gets_a_suffix():
    """A-E7."""
    assert rank_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert rank_endpoint("tcp://*:0", 2) == "tcp://*:0"
    assert rank_endpoint("ipc:///tmp/feed", 1) == "ipc:///tmp/feed_dp1"
    assert rank_endpoint("inproc://feed", 3) == "inproc://feed_dp3"
    assert rank_endpoint("inproc://feed", 0) == "inproc://feed"
    for bad in ("tcp://host", "host:5557", "udp://host:1", "tcp://"):
        with pytest.raises(ConfigError):
            rank_endpoint(bad, 0)


@pytest.mark.parametrize(
    ("consumer", "encoding", "contiguity", "start"),
    [
        ("vllm", "map", "relaxed", "zero"),
        ("dynamo", "map", "relaxed", "epoch"),
        ("llm-d", "map", "strict", "zero"),
        ("vllm-router", "map", "strict", "zero"),
        ("aibrix", "array", "strict", "zero"),
        ("llm-d,aibrix", "array", "strict", "zero"),
    ],
)
def test_a_preset_sets_what_its_consumer_needs(consumer, encoding, contiguity, start):
    (found,) = settings(consumer=consumer)
    assert (found.encoding, found.contiguity, found.sequence_start) == (encoding, contiguity, start)
    assert found.topic == ("" if consumer == "vllm-router" else "kv@pod@org/model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumer": "aibrix,vllm-router"}, "no common encoding"),
        ({"consumer": "dynamo,llm-d"}, "different sequence starts"),
        ({"consumer": "aibrix", "encoding": "map"}, "is not read"),
        ({"consumer": "dynamo", "contiguity": "strict"}, "exclude each other"),
        ({"consumer": "llm-d", "topic": "kv"}, "refused by llm-d"),
        ({"consumer": "llm-d,vllm-router"}, "refused by llm-d"),
        ({"consumer": "llm-d", "topic": "kv@a@b@c"}, "refused by llm-d"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        settings(**options)


def test_loopback_is_recognised():
    assert is_loopback("tcp://127.0.0.1:5557")
    assert is_loopback("ipc:///tmp/feed")
    assert not is_loopback("tcp://0.0.0.0:5557")
    assert not is_loopback("tcp://10.0.0.1:5557")


def test_auto_bind_follows_vllm():
    assert not settings(bind="auto")[0].bind
    assert settings(bind="auto", endpoint="tcp://*:5557")[0].bind
    assert settings()[0].bind
