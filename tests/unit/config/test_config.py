"""`OffloadConfig`: what it accepts, what it refuses, and how it says so."""

import ast
import inspect
import json
import pickle

import numpy as np
import pytest

from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.config_values import parse_bytes
from kvoffload.errors import ConfigError

GOOD = {"cpu_bytes_to_use": "1GiB", "gpu_block_size": 16}


def config(**changes):
    return OffloadConfig(**{**GOOD, **changes})


@pytest.mark.parametrize("value", [0, -1, "ten", 1.5, True])
def test_wrong_cpu_bytes_is_a_value_error_that_names_key_and_value(value):
    """A-C1."""
    with pytest.raises(ConfigError, match="cpu_bytes_to_use") as caught:
        config(cpu_bytes_to_use=value)
    assert isinstance(caught.value, ValueError)
    assert repr(value) in str(caught.value)


def test_absent_cpu_bytes_is_a_value_error_that_names_the_key():
    """A-C1."""
    with pytest.raises(ValueError, match="cpu_bytes_to_use is missing"):
        OffloadConfig(gpu_block_size=16)


@pytest.mark.parametrize(("text", "size"), [("1048576", 1 << 20), ("10GB", 10**10), ("8GiB", 8 << 30), (7, 7)])
def test_sizes_accept_units(text, size):
    """A-C1."""
    assert config(cpu_bytes_to_use=text).cpu_bytes_to_use == size
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.5", "1e9", "10 parsecs", "-1GiB", "0"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="limit"):
        parse_bytes(text, key="limit")


@pytest.mark.parametrize("block_size", [24, 8, 0, -16])
def test_block_size_that_is_no_multiple_names_both_numbers(block_size):
    """A-C3."""
    with pytest.raises(ValueError, match=rf"block_size .*16.*{block_size}"):
        config(block_size=block_size)


def test_block_size_given_as_text_counts():
    """A-C3."""
    assert config(block_size="32").block_size_factor == 2


def test_groups_of_unequal_block_size_refuse_an_offloaded_block_size():
    """A-C3."""
    with pytest.raises(ValueError, match="16 and 32"):
        config(gpu_block_size=(16, 32), block_size=32)


def test_groups_that_do_not_align_are_refused():
    with pytest.raises(ConfigError, match="smallest, 16; got 24"):
        config(gpu_block_size=(16, 24))


def test_groups_give_layouts_and_the_smallest_hash_block():
    groups = config(gpu_block_size=(32, 16))
    assert groups.hash_block_size == 16
    assert [layout.block_size for layout in groups.group_layouts()] == [32, 16]
    assert config(block_size=64).group_layouts()[0].factor == 4


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "x", [], [16, 0], None])
def test_wrong_gpu_block_size_is_refused(value):
    with pytest.raises(ConfigError, match="gpu_block_size"):
        config(gpu_block_size=value)


def test_unknown_key_is_refused_with_the_nearest_match():
    with pytest.raises(ConfigError, match="evction_policy is no known key; did you mean eviction_policy"):
        config(evction_policy="lru")
    with pytest.raises(ConfigError, match=r"events\.endpont is no known key; did you mean endpoint"):
        config(events={"endpont": "tcp://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="known keys: block_size, cpu_bytes_to_use"):
        config(zzz=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("load_deadline_seconds", -1),
        ("load_deadline_seconds", float("nan")),
        ("load_deadline_seconds", True),
        ("pin_memory", "sometimes"),
        ("world_size", 0),
        ("store_threshold", -1),
        ("max_tracker_size", 0),
        ("max_inflight_store_bytes", "many"),
        ("prefill_tokens_per_second", 0),
        ("enabled", "maybe"),
        ("events", 3),
        ("eviction_policy", ""),
    ],
)
def test_wrong_value_names_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        config(**{key: value})


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError, match=r"world_size.*store_threshold"):
        config(world_size=0, store_threshold=-1)


def test_errors_and_configs_are_picklable():
    with pytest.raises(ConfigError) as caught:
        config(world_size=0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert pickle.loads(pickle.dumps(config(events=EventsConfig()))) == config(events=True)


def test_config_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        config().world_size = 2


def test_model_validate_speaks_with_the_same_errors():
    assert OffloadConfig.model_validate(GOOD) == config()
    with pytest.raises(ConfigError, match="world_size"):
        OffloadConfig.model_validate({**GOOD, "world_size": 0})
    with pytest.raises(ConfigError, match="mapping"):
        OffloadConfig.model_validate(3)


def test_defaults_are_the_documented_ones():
    base = config()
    assert (base.eviction_policy, base.store_threshold, base.block_size_factor, base.pin_memory) == (
        "lru",
        0,
        1,
        "auto",
    )
    assert (base.pending_wait_seconds, base.load_deadline_seconds, base.store_deadline_seconds) == (0.2, 5.0, 30.0)
    assert (base.lease_seconds, base.drain_seconds, base.events) == (60.0, 10.0, None)
    events = EventsConfig()
    assert (events.endpoint, events.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert events.bind is True


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_arguments_win_over_variables_and_variables_over_the_file(tmp_path, suffix):
    path = tmp_path / f"config{suffix}"
    if suffix == ".toml":
        path.write_text(
            'cpu_bytes_to_use = "1GiB"\ngpu_block_size = 16\nworld_size = 2\nstore_threshold = 2\n'
            '[events]\npod = "file"\ntopic = "file"\ndp_rank = 1\n'
        )
    else:
        path.write_text(
            json.dumps(
                {
                    **GOOD,
                    "world_size": 2,
                    "store_threshold": 2,
                    "events": {"pod": "file", "topic": "file", "dp_rank": 1},
                }
            )
        )
    env = {"KVOFFLOAD_WORLD_SIZE": "4", "KVOFFLOAD_EVENTS__TOPIC": "env", "KVOFFLOAD_EVENTS__POD": "env", "HOME": "/"}
    loaded = OffloadConfig.load(path, env=env, eviction_policy="arc", events={"pod": "argument"})
    assert (loaded.world_size, loaded.store_threshold, loaded.eviction_policy) == (4, 2, "arc")
    assert loaded.events == EventsConfig(pod="argument", topic="env", dp_rank=1)


def test_variables_hold_lists_none_and_switches():
    env = {
        "KVOFFLOAD_CPU_BYTES_TO_USE": "8GiB",
        "KVOFFLOAD_GPU_BLOCK_SIZE": "16,32",
        "KVOFFLOAD_EVENTS__MEDIA": "GPU, CPU",
        "KVOFFLOAD_EVENTS__REPLAY_ENDPOINT": "none",
        "KVOFFLOAD_ENABLED": "false",
    }
    loaded = OffloadConfig.load(env=env)
    assert loaded.gpu_block_size == (16, 32)
    assert loaded.events is not None
    assert (loaded.events.media, loaded.events.replay_endpoint, loaded.enabled) == (("GPU", "CPU"), None, False)
    assert OffloadConfig.load(env={**env, "KVOFFLOAD_EVENTS": "off"}, gpu_block_size=16) is not None


def test_unknown_variable_is_refused_by_its_own_name():
    with pytest.raises(ConfigError, match=r"KVOFFLOAD_CPU_BYTE_TO_USE.*did you mean cpu_bytes_to_use"):
        OffloadConfig.load(env={"KVOFFLOAD_CPU_BYTE_TO_USE": "1"})
    with pytest.raises(ConfigError, match="KVOFFLOAD_EVENTS__ENDPONT"):
        OffloadConfig.load(env={"KVOFFLOAD_EVENTS__ENDPONT": "1"})


def test_variables_of_a_kubernetes_service_named_kvoffload_are_not_ours():
    env = {
        "KVOFFLOAD_SERVICE_HOST": "10.0.0.1",
        "KVOFFLOAD_SERVICE_PORT_FEED": "5557",
        "KVOFFLOAD_PORT": "tcp://10.0.0.1:5557",
        "KVOFFLOAD_PORT_5557_TCP_ADDR": "10.0.0.1",
        "KVOFFLOAD_FEED_SERVICE_PORT": "5557",
    }
    assert OffloadConfig.load(env=env, **GOOD) == config()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", "", "toml or .json"),
        ("c.toml", "a = ", "cannot be read"),
        ("c.json", "[1]", "must hold a table"),
        ("absent.json", None, "cannot be read"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path, name, text, expected):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        OffloadConfig.load(path, env={})
    assert name in str(caught.value)


@pytest.mark.parametrize("switched", ["true", "off", "none"])
def test_variables_of_the_feed_mean_the_same_in_any_order(switched):
    env = {"KVOFFLOAD_EVENTS": switched, "KVOFFLOAD_EVENTS__POD": "pod-1"}
    reverse = dict(reversed(env.items()))
    expected = EventsConfig(pod="pod-1") if switched == "true" else None
    for variables in (env, reverse):
        assert OffloadConfig.load(env=variables, **GOOD).events == expected


def test_switching_the_feed_on_keeps_what_a_file_says_about_it(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[events]\npod = "pod-1"\n')
    assert OffloadConfig.load(path, env={"KVOFFLOAD_EVENTS": "true"}, **GOOD).events == EventsConfig(pod="pod-1")
    assert OffloadConfig.load(path, env={"KVOFFLOAD_EVENTS": "off"}, **GOOD).events is None


def test_integers_of_numpy_are_integers():
    counted = config(cpu_bytes_to_use=np.int64(1 << 20), gpu_block_size=np.int32(16), store_threshold=np.uint8(2))
    assert counted == config(cpu_bytes_to_use=1 << 20, gpu_block_size=16, store_threshold=2)


def test_a_decimal_size_is_exact():
    assert parse_bytes("1.1GB") == 1_100_000_000
    assert parse_bytes("9007199254740993.5kb") == 9_007_199_254_740_993_500


def test_a_file_nested_without_end_cannot_be_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        OffloadConfig.load(path, env={})


def test_a_frozen_configuration_says_so_with_its_own_error():
    config = OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=16)
    with pytest.raises(ConfigError, match="gpu_block_size cannot be set to 32: OffloadConfig is frozen"):
        config.gpu_block_size = 32
    assert config.gpu_block_size == 16


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSON"),
        ("[1]", "mapping"),
        ('{"gpu_block_siz": 16, "cpu_bytes_to_use": 1}', "did you mean gpu_block_size"),
    ],
)
def test_json_that_is_no_configuration_is_told_by_a_config_error(text, told):
    with pytest.raises(ConfigError, match=told):
        OffloadConfig.model_validate_json(text)
    assert OffloadConfig.model_validate_json('{"gpu_block_size": 16, "cpu_bytes_to_use": "1MiB"}').gpu_block_size == 16


@pytest.mark.parametrize("model", [OffloadConfig, EventsConfig])
def test_checkers_are_told_each_key_and_which_must_be_given(model):
    """Without pydantic's plugin a checker sees the `__init__` that is written for it, not the fields."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(model)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    init = next(node for node in ast.walk(body) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    told = dict(zip([each.arg for each in init.args.kwonlyargs], init.args.kw_defaults, strict=True))
    assert list(told) == list(model.model_fields)
    assert {key for key, default in told.items() if default is None} == {
        key for key, field in model.model_fields.items() if field.is_required()
    }
