"""`kvoffload feed register`, `verify` and `snippet` against a real Dynamo indexer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from consumers import BLOCK, DYNAMO, chain, dynamo, free_port, publisher, store, wait_for

from kvoffload.cli.main import main
from kvoffload.events.register import DynamoIndexer
from kvoffload.keys import BlockInfo
from kvoffload.manager.base import OffloadingEvent

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not DYNAMO, reason="KVOFFLOAD_DYNAMO_PYTHON names no Python with ai-dynamo-runtime"),
]
ROOT = Path(__file__).parents[2]
CODE = "import sys; from kvoffload.cli.main import main; sys.exit(main())"
_instances = count(100)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory):
    with dynamo(tmp_path_factory.mktemp("dynamo") / "log") as found:
        yield found


def feed_command(capsys, *arguments):
    """Run `kvoffload feed ...` and return its exit code and output."""
    capsys.readouterr()
    code = main(["feed", *arguments])
    return code, capsys.readouterr().out


def verify(capsys, feed, indexer, *arguments):
    code, out = feed_command(
        capsys, "verify", "--replay", feed.replay_endpoints[0], "--indexer", indexer.url, "--json", *arguments
    )
    result = json.loads(out)
    assert code == (0 if result["ok"] else 1)
    return result


def register(capsys, feed, indexer, instance):
    code, _ = feed_command(
        capsys, "register", "--indexer", indexer.url, "--replay", feed.replay_endpoints[0], "--instance", str(instance)
    )
    assert code == 0


@pytest.fixture
def instance(indexer):
    number = next(_instances)
    yield number
    for model in ("m", "other"):
        indexer_url_unregister(indexer, model, number)


def indexer_url_unregister(indexer, model, number):
    DynamoIndexer(indexer.url).unregister(number, model)


def test_a_registered_feed_is_found_completely(indexer, instance, capsys):
    with publisher("dynamo") as feed:
        store(feed, chain(1, 8))
        feed.gpu_stored(chain(2, 6), 0, 3)
        store(feed, chain(2, 6))
        feed.flush()
        register(capsys, feed, indexer, instance)
        register(capsys, feed, indexer, instance)  # again: the old registration is removed first
        result = verify(capsys, feed, indexer, "--wait", "5")
        assert result["ok"], result
        assert result["found"] == {"gpu": 3 * BLOCK, "cpu": 14 * BLOCK}
        code, out = feed_command(capsys, "verify", "--replay", feed.replay_endpoints[0], "--indexer", indexer.url)
        assert code == 0
        assert "cpu: 224 of 224 tokens found" in out


def test_a_restarted_feed_with_another_instance_id_is_not_registered_as_a_second_worker(indexer, capsys):
    """An instance id that is not configured is made anew in each process."""
    ports = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    for name in ("first", "second"):
        with publisher("dynamo", instance_id=name, **ports) as feed:
            store(feed, chain(1, 4))
            feed.flush()
            arguments = ("register", "--indexer", indexer.url, "--replay", feed.replay_endpoints[0])
            assert feed_command(capsys, *arguments)[0] == 0
            assert verify(capsys, feed, indexer, "--wait", "5")["ok"]
            ours = [w for w in DynamoIndexer(indexer.url).workers() if ports["endpoint"] in w["endpoints"].values()]
            assert len(ours) == 1
            if name == "second":
                assert feed_command(capsys, *arguments, "--unregister") == (0, "unregistered\n")


def test_verify_says_what_to_do_where_nothing_is_registered(indexer, capsys):
    with publisher("dynamo", instance_id="lonely") as feed:
        store(feed, chain(1, 4))
        result = verify(capsys, feed, indexer, "--wait", "0.1", "--model", "nobody-registered-this")
        assert names_of(result) == ["registration"]
        assert "kvoffload feed register" in result["findings"][0]["text"]


def test_registration_at_start_and_close_is_automatic_and_never_fatal(indexer, capsys):
    with publisher("dynamo", indexer=indexer.url) as feed:
        store(feed, chain(1, 4))
        wait_for(lambda: verify(capsys, feed, indexer)["ok"])
    with publisher("dynamo", indexer=f"http://127.0.0.1:{free_port()}") as feed:
        store(feed, chain(1, 4))
        assert feed.flush()


def test_the_snippet_for_dynamo_works_when_pasted(indexer, capsys):
    with publisher("dynamo") as feed:
        store(feed, chain(1, 4))
        feed.flush()
        _, out = feed_command(
            capsys, "snippet", "--for", "dynamo", "--replay", feed.replay_endpoints[0], "--indexer", indexer.url
        )
        body = json.loads(out[out.index("'{") + 1 : out.rindex("'")])
        subprocess.run(["bash", "-c", out], check=True, capture_output=True)
        assert verify(capsys, feed, indexer, "--wait", "5")["ok"]
        indexer.unregister(body["model_name"], body["instance_id"])


def names_of(result):
    return [finding["name"] for finding in result["findings"]]


def test_verify_names_a_wrong_model(indexer, instance, capsys):
    with publisher("dynamo") as feed:
        store(feed, chain(1, 4))
        indexer.register(feed, "other", instance=instance)
        result = verify(capsys, feed, indexer, "--wait", "0.1")
        assert names_of(result) == ["model"]
        assert "'m'" in result["findings"][0]["text"]
        assert "'other'" in result["findings"][0]["text"]


def test_verify_names_a_wrong_block_size(indexer, instance, capsys):
    from consumers import call

    with publisher("dynamo") as feed:
        store(feed, chain(1, 4))
        body = {
            "instance_id": instance, "endpoint": feed.endpoints[0], "replay_endpoint": feed.replay_endpoints[0],
            "model_name": "other", "block_size": 32, "dp_rank": 0,
        }  # fmt: skip
        call(indexer.url + "/register", body)
        result = verify(capsys, feed, indexer, "--wait", "0.1", "--model", "other")
        assert names_of(result) == ["block size"]


def test_verify_names_a_wrong_port(indexer, instance, capsys):
    with publisher("dynamo") as feed:
        store(feed, chain(1, 4))

        wrong = SimpleNamespace(endpoints=[f"tcp://127.0.0.1:{free_port()}"], replay_endpoints=feed.replay_endpoints)
        indexer.register(wrong, "m", instance=instance)
        result = verify(capsys, feed, indexer, "--wait", "0.1")
        assert names_of(result) == ["port"]
        assert wrong.endpoints[0] in result["findings"][0]["text"]
    code, out = feed_command(capsys, "verify", "--replay", f"tcp://127.0.0.1:{free_port()}", "--timeout", "0.2")
    assert code == 1
    assert "port: no answer" in out


def test_verify_names_a_stale_watermark_and_register_heals_it(indexer, instance, capsys):
    ports = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    with publisher("vllm", **ports) as feed:  # numbers from 0
        register(capsys, feed, indexer, instance)
        for seed in range(1, 40):
            store(feed, chain(seed, 1))
            feed.flush()
        assert verify(capsys, feed, indexer, "--wait", "5")["ok"]
    with publisher("vllm", **ports) as feed:
        store(feed, chain(50, 4))
        feed.flush()
        result = verify(capsys, feed, indexer, "--wait", "0.5")
        assert names_of(result) == ["stale watermark"]
        register(capsys, feed, indexer, instance)
        assert verify(capsys, feed, indexer, "--wait", "5")["ok"]


def test_verify_names_a_loopback_endpoint(capsys, indexer):
    with publisher("dynamo") as feed:
        _, out = feed_command(
            capsys, "verify", "--replay", feed.replay_endpoints[0], "--indexer", "http://indexer.invalid:8090", "--json"
        )
        assert "loopback" in names_of(json.loads(out))


@pytest.mark.parametrize(
    ("name", "consumer", "options"),
    [
        ("topic", "llm-d", {"topic": "kv-events"}),
        ("topic", "vllm-router", {}),
        ("profile", "vllm-router", {"encoding": "array", "topic": ""}),
        ("profile", "aibrix", {}),
        ("profile", "dynamo", {"hash_mode": "bytes"}),
    ],
)
def test_verify_names_a_wrong_topic_and_a_wrong_profile(name, consumer, options, capsys):
    with publisher("vllm", **options) as feed:
        _, out = feed_command(capsys, "verify", "--for", consumer, "--replay", feed.replay_endpoints[0], "--json")
        assert name in names_of(json.loads(out))


def test_verify_names_salted_blocks_without_extra_keys(indexer, instance, capsys):
    with publisher("dynamo") as feed:
        keys = list(chain(1, 2, cache_salt="tenant").keys())
        infos = {k: BlockInfo((k[:-4],), None, tuple(range(BLOCK)), BLOCK, salted=True) for k in keys}
        feed.publish([OffloadingEvent(keys, "CPU", False)], infos)
        store(feed, chain(2, 4))
        feed.flush()
        register(capsys, feed, indexer, instance)
        result = verify(capsys, feed, indexer, "--wait", "5")
        assert names_of(result) == ["salt"]
        assert result["found"] == result["expected"]


def test_the_commands_of_the_guides_run_as_they_stand(indexer, tmp_path):
    """Only the ports are others, and the indexer is the one that runs already."""
    feed, replay = free_port(), free_port()
    ports = {
        "tcp://127.0.0.1:5557": f"tcp://127.0.0.1:{feed}",
        "tcp://127.0.0.1:5558": f"tcp://127.0.0.1:{replay}",
        "http://127.0.0.1:8090": indexer.url,
    }
    lines = []
    for name in ("connect-indexers", "no-cpu-hits"):
        page = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
        lines += re.search(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    run, server, *asked = lines
    assert server == "python -m dynamo.indexer --port 8090"
    assert [line.split()[2] for line in asked] == ["snippet", "register", "verify", "verify"]

    def command(line):
        for port, other in ports.items():
            line = line.replace(port, other)
        return [sys.executable, "-c", CODE, *shlex.split(line)[1:]]

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    log = (tmp_path / "run.log").open("wb")
    with log, subprocess.Popen(
        [*command(run), "--feed-replay", f"tcp://127.0.0.1:{replay}"], env=env, stdout=log, stderr=log
    ) as process:  # fmt: skip
        try:
            wait_for(
                lambda: subprocess.run(command(asked[0]), env=env, capture_output=True, check=False).returncode == 0
            )
            for line in asked:
                done = subprocess.run(command(line), env=env, capture_output=True, text=True, timeout=60, check=False)
                assert done.returncode == 0, (line, done.stdout, done.stderr)
            assert done.stdout.endswith("tokens found\nok\n")
            assert subprocess.run(
                [*command(asked[1]), "--unregister"], env=env, capture_output=True, check=True, text=True
            ).stdout == "unregistered\n"  # fmt: skip
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, (tmp_path / "run.log").read_text()
