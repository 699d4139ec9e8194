"""What a configuration file can get wrong: a message with file, key, value, what it must be, and the remedy."""

import json

import pytest

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError

GOOD = {"cpu_bytes_to_use": "1GiB", "gpu_block_size": 16}
VALUES = [
    ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use", "got 0", "'512MiB' or '10GB'"),
    ({"cpu_bytes_to_use": "1.5"}, "cpu_bytes_to_use", "got '1.5'", "positive size in bytes, such as 1048576"),
    ({"gpu_block_size": [16, "x"]}, "gpu_block_size", "[16, 'x']", "such as 16, or one for each KV-cache group"),
    ({"gpu_block_size": 16.5}, "gpu_block_size", "got 16.5", "positive whole number of tokens, such as 16"),
    ({"gpu_block_size": [16, 24]}, "gpu_block_size", "got 24", "multiples of its smallest, 16"),
    ({"gpu_block_size": [16, 32], "block_size": 32}, "block_size 32", "got 16 and 32", "leave it out"),
    ({"block_size": 24}, "block_size", "got 24", "multiple of gpu_block_size 16, such as 16 or 32"),
    ({"world_size": 0}, "world_size", "got 0", "must be at least 1"),
    ({"world_size": True}, "world_size", "got True", "must be a whole number, such as"),
    ({"eviction_policy": ""}, "eviction_policy", "got ''", "must be a name that is not empty"),
    ({"eviction_policy": 5}, "eviction_policy", "got 5", "must be text"),
    ({"store_threshold": -1}, "store_threshold", "got -1", "must be at least 0"),
    ({"pin_memory": "maybe"}, "pin_memory", "got 'maybe'", "must be 'auto', 'require' or 'never'"),
    ({"lease_seconds": -1}, "lease_seconds", "got -1", "must be at least 0"),
    ({"load_deadline_seconds": "soon"}, "load_deadline_seconds", "got 'soon'", "must be a number"),
    ({"fail_open": "maybe"}, "fail_open", "got 'maybe'", "must be true or false"),
    ({"prefill_tokens_per_second": 0}, "prefill_tokens_per_second", "got 0", "must be above 0"),
    ({"max_inflight_load_bytes": "1XB"}, "max_inflight_load_bytes", "got '1XB'", "'512MiB' or '10GB'"),
    ({"world_siz": 2}, "world_siz is no known key", "did you mean world_size?"),
    ({"nothing_like_it": 2}, "nothing_like_it is no known key", "known keys: block_size, cpu_bytes_to_use"),
    ({"events": 7}, "events", "got 7", "must be a table of keys, or true or false"),
    ({"events": {"endpont": "x"}}, "events.endpont is no known key", "did you mean endpoint?"),
    ({"events": {"endpoint": 5}}, "events.endpoint", "got 5", "must be text"),
    ({"events": {"consumer": ["vllm", "x"]}}, "events.consumer.1", "got 'x'", "'dynamo', 'llm-d'"),
    ({"events": {"bind": "x"}}, "events.bind", "got 'x'", "true or false or 'auto'"),
    ({"events": {"media": "GPU,X"}}, "events.media.1", "got 'X'", "'GPU', 'CPU' or 'STORAGE'"),
    ({"events": {"merge_from": 5}}, "events.merge_from", "got 5", "a list, or text with commas"),
    ({"events": {"also": "x"}}, "events.also", "got 'x'", "a list of tables"),
    ({"events": {"also": [{"dp_rank": -1}]}}, "events.also.0.dp_rank", "got -1", "must be at least 0"),
]
TEXTS = [
    ("absent.toml", None, "absent.toml", "No such file or directory", "give the path of a .toml or .json file"),
    ("c.yaml", "", "c.yaml", "must end in .toml or .json", "rename it"),
    ("c.toml", "gpu_block_size = ", "c.toml", "cannot be read", "correct it there"),
    ("c.json", "{", "c.json", "line 1 column 2", "correct it there"),
    ("c.json", "[1]", "c.json", "got [1]", "must hold a table of keys and values, such as gpu_block_size"),
    ("c.json", "{}", "cpu_bytes_to_use is missing", "set it", '"8GiB"', "gpu_block_size is missing"),
]


@pytest.mark.parametrize(("values", "told"), [(values, told) for values, *told in VALUES], ids=str)
def test_a_wrong_value_in_a_file_is_told_with_file_key_value_and_what_is_right(values, told, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**GOOD, **values}))
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(path, env={})
    message = str(caught.value)
    assert message.startswith(f"{path}: "), "the file is named"
    assert [words for words in told if words not in message] == [], message


@pytest.mark.parametrize(("name", "text", "told"), [(name, text, told) for name, text, *told in TEXTS])
def test_a_file_that_cannot_be_used_is_told_with_what_to_do(name, text, told, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(path, env={})
    assert [words for words in told if words not in str(caught.value)] == [], str(caught.value)


def test_each_wrong_key_is_told_with_its_own_place(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**GOOD, "world_size": 0, "events": {"ranks": 0}}))
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(path, env={"KVOFFLOAD_EVENTS__RANKS": "-1"}, store_threshold=-1)
    assert sorted(str(caught.value).split("; ")) == sorted(
        [
            f"{path}: world_size must be at least 1", "got 0",
            "KVOFFLOAD_EVENTS__RANKS: events.ranks must be at least 1", "got '-1'",
            "store_threshold must be at least 0", "got -1",
        ]
    )  # fmt: skip
    assert sorted(key for key, _ in caught.value.problems) == ["events.ranks", "store_threshold", "world_size"]
