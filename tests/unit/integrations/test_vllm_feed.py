from __future__ import annotations

import pytest

from kvoffload.keys import BlockInfo
from kvoffload.manager.base import OffloadingEvent

A, B = (bytes([number]) * 32 + b"\0\0\0\0" for number in (1, 2))


def stored(*keys):
    return OffloadingEvent(list(keys), "CPU", removed=False)


def removed(*keys):
    return OffloadingEvent(list(keys), "CPU", removed=True)


def info(key):
    return BlockInfo((b"\x11" * 32, key[:-4]), None, tuple(range(8)), 4)


@pytest.fixture
def feed(adapter):
    from kvoffload.integrations import vllm_feed

    return vllm_feed


def drained(feed):
    return [(event.removed, event.keys) for event in feed.take()]


def test_vllms_publisher_gets_events_once(feed):
    out = feed.VllmFeed(factor=1)
    out.publish([removed(B), stored(A)])
    assert drained(out) == [(True, [B]), (False, [A])]
    assert drained(out) == []


def test_a_reset_names_every_engine_block_that_was_announced(feed):
    out = feed.VllmFeed(factor=2)
    out.infos[A] = info(A)
    out.publish([stored(A)])
    drained(out)
    out.reset([removed(A)])
    assert drained(out) == [(True, [b"\x11" * 32 + b"\0\0\0\0", A])]


def test_a_store_that_vllm_had_not_drained_at_a_reset_was_never_news(feed):
    out = feed.VllmFeed(factor=1)
    out.publish([stored(A)])
    drained(out)
    out.publish([stored(B)])
    out.reset([removed(A, B)])
    assert drained(out) == [(True, [A])]


def test_a_removal_that_vllm_had_not_drained_survives_a_reset(feed):
    out = feed.VllmFeed(factor=1)
    out.publish([stored(A)])
    drained(out)
    out.publish([removed(A)])
    out.reset([])
    assert drained(out) == [(True, [A])]


def test_descriptions_are_wanted_only_where_they_are_used(feed):
    assert not feed.VllmFeed(factor=1).needs_infos
    assert feed.VllmFeed(factor=2).needs_infos


def test_the_own_publisher_gets_descriptions_and_vllms_gets_nothing(feed):
    calls = []

    class Sink:
        def publish(self, events, infos):
            calls.append((events, infos))

    out = feed.OwnFeed(Sink())
    out.infos[A] = info(A)
    out.publish([stored(A)])
    assert calls == [([stored(A)], {A: info(A)})]
    assert out.infos == {}
    assert list(out.take()) == []
    out.close()


def test_descriptions_of_failed_and_reset_stores_are_dropped(feed):
    calls = []

    class Sink:
        def publish(self, events, infos):
            calls.append((events, infos))

    out = feed.OwnFeed(Sink())
    out.infos.update({A: info(A), B: info(B)})
    out.forget([A])
    assert list(out.infos) == [B]
    out.reset([removed(A)])
    assert out.infos == {}
    assert calls == [([removed(A)], {})]
