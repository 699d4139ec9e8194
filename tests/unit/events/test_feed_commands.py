"""`kvoffload feed watch` and `snippet` on a running publisher."""

from __future__ import annotations

import json

import pytest
from feedkit import BLOCK, chain, publisher, removed, stored

from kvoffload.cli.main import main
from kvoffload.events.register import DynamoIndexer
from kvoffload.events.subscriber import SourceReset, Unrecoverable


def test_watch_shows_the_snapshot_and_what_follows_as_json_lines(capsys):
    with publisher(heartbeat_seconds=0.1) as feed:
        feed.publish(*stored(chain(1, 3)))
        feed.flush()
        arguments = ["feed", "watch", feed.endpoints[0], "--replay", feed.replay_endpoints[0], "--seconds", "0.3"]
        assert main([*arguments, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in lines] == ["reset", "stored", "stored", "stored", "synced"]
        assert lines[1]["medium"] == "CPU"
        assert lines[1]["tokens"] == BLOCK
        assert lines[2]["parent"] == lines[1]["hashes"][0]
        feed.publish(*removed(chain(1, 3), 2))
        feed.flush()
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert text.count("stored") == 2
        assert "medium CPU" in text


class Fading:
    """A subscription that is heard, falls silent and is heard again, a poll each."""

    sequence, silent_seconds = 3, 4.26

    def __init__(self, *_args, **_options):
        self._silent = [False, True, True, False]

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        pass

    def poll(self, _timeout):
        self.silent = self._silent.pop(0) if self._silent else False
        return iter(())


def test_watch_marks_a_source_that_falls_silent_and_is_heard_again(monkeypatch, capsys):
    monkeypatch.setattr("kvoffload.cli.feed_watch.Subscription", Fading)
    assert main(["feed", "watch", "--seconds", "0.05", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"event": "silent", "seconds": 4.3}, {"event": "heard again"}]


class Absent(Fading):
    silent = False

    def poll(self, _timeout):
        return iter([SourceReset("start"), Unrecoverable("no answer")])


def test_watch_says_once_that_nobody_answers_yet(monkeypatch, capsys):
    monkeypatch.setattr("kvoffload.cli.feed_watch.Subscription", Absent)
    assert main(["feed", "watch", "--seconds", "0.05", "--json"]) == 0
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["reset", "unrecoverable"]


def test_watch_says_what_cannot_be_recovered(capsys):
    with publisher(replay_endpoint=None) as feed:
        assert main(["feed", "watch", feed.endpoints[0], "--replay", "tcp://127.0.0.1:9", "--seconds", "0.1"]) == 0
        assert "unrecoverable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("consumer", "parts"),
    [
        ("dynamo", ["curl -sS -X POST http://127.0.0.1:8090/register", '"block_size": 4', '"model_name": "m"']),
        ("vllm-router", ["--policy kv_aware", "--kv-event-source http://127.0.0.1:8000=tcp://", "# topic:"]),
        ("llm-d", ['topicFilter: "kv@"', "socketPort: ", "replaySocketPort: "]),
        ("aibrix", ["kv-events-enabled", "# profile: aibrix does not read the map profile"]),
    ],
)
def test_snippets_hold_the_publishers_own_values(consumer, parts, capsys):
    with publisher(model_name="m") as feed:
        assert main(["feed", "snippet", "--for", consumer, "--replay", feed.replay_endpoints[0]]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in parts), out


def test_a_publisher_that_does_not_answer_is_named(capsys):
    with publisher() as feed:
        port = feed.endpoints[0]
    assert main(["feed", "snippet", "--for", "dynamo", "--replay", port, "--timeout", "0.1"]) == 1
    assert f"no answer from {port}" in capsys.readouterr().err


def test_a_snippet_as_json_is_one_object_with_the_feeds_own_description(capsys):
    with publisher(model_name="m") as feed:
        assert main(["feed", "snippet", "--for", "llm-d", "--replay", feed.replay_endpoints[0], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["consumer"] == "llm-d"
    assert shown["feed"]["model_name"] == "m"
    assert 'topicFilter: "kv@"' in shown["snippet"]
    assert [set(finding) for finding in shown["findings"]] == [{"name", "text"}] * len(shown["findings"])


def test_registering_as_json_is_one_object_with_the_body(monkeypatch, capsys):
    calls = []

    def answer(_indexer, path, body=None):
        calls.append(path)
        return [] if path == "/workers" else None

    monkeypatch.setattr(DynamoIndexer, "_call", answer)
    with publisher(model_name="m") as feed:
        arguments = ["--indexer", "http://indexer", "--replay", feed.replay_endpoints[0], "--instance", "7", "--json"]
        assert main(["feed", "register", *arguments]) == 0
        registered = json.loads(capsys.readouterr().out)["registered"]
        assert (registered["instance_id"], registered["model_name"]) == (7, "m")
        assert calls[-1] == "/register"
        assert main(["feed", "register", *arguments, "--unregister"]) == 0
    assert json.loads(capsys.readouterr().out) == {"unregistered": True, "instance_id": 7, "model_name": "m"}
