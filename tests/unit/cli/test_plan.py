"""`kvoffload plan`: bytes before anything is mapped."""

import json

import numpy as np
import pytest

import kvoffload as kv
from kvoffload.cli.main import main
from kvoffload.cli.model_geometry import LayerGroup, ModelGeometry
from kvoffload.cli.plan import plan
from kvoffload.memory.preflight import SystemPaths
from kvoffload.spec.base import KVCacheConfig
from kvoffload.spec.cpu import CPUOffloadingSpec

SETTINGS = ["--set", "cpu_bytes_to_use=64MiB", "--set", "gpu_block_size=16"]


def planned(capsys, *arguments, code=0):
    assert main(["plan", *SETTINGS, *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_numbers_of_a_grouped_query_model_on_four_ranks(capsys):
    values = planned(capsys, "--group", "32:8:128", "--set", "world_size=4", "--set", "block_size=64")
    per_rank = 32 * 2 * 2 * 128 * 2 * 16
    assert values["engine_block_bytes_per_rank"] == per_rank
    assert values["offloaded_block_bytes_per_rank"] == values["group_block_bytes_per_rank"][0] == per_rank * 4
    assert values["offloaded_block_bytes"] == per_rank * 16
    assert values["offloaded_blocks"] == (64 << 20) // (per_rank * 16)
    assert values["tokens_held"] == values["offloaded_blocks"] * 64
    assert values["rank_bytes"] * 4 == values["total_bytes"] == values["offloaded_blocks"] * per_rank * 16
    assert values["unused_bytes"] == (64 << 20) - values["total_bytes"]
    assert values["fits"] is True


def test_the_plan_is_what_the_spec_does_with_real_tensors():
    config = kv.OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=16, block_size=32)
    layers = {f"layer.{index}": np.zeros((2, 8, 16, 4, 8), np.float16) for index in range(3)}
    caches = kv.CanonicalKVCaches.from_layers(layers, block_dim=1)
    spec = CPUOffloadingSpec(config, KVCacheConfig.from_canonical(caches, config))
    values = plan(config, ModelGeometry((LayerGroup(3, 4, 8),)))
    assert values["engine_block_bytes_per_rank"] == caches.bytes_per_block
    assert (values["offloaded_block_bytes"], values["offloaded_blocks"]) == (
        spec.offloaded_block_bytes,
        spec.num_blocks,
    )


def test_a_latent_cache_is_whole_on_every_rank(capsys):
    values = planned(capsys, "--group", "61:mla:576", "--set", "world_size=2", "--dtype", "fp8")
    assert values["engine_block_bytes_per_rank"] == 61 * 576 * 16


@pytest.mark.parametrize(
    ("options", "group"),
    [
        (["--layers", "32", "--kv-heads", "8", "--head-dim", "128"], "32:8:128"),
        (["--layers", "61", "--latent-dim", "576"], "61:mla:576"),
    ],
)
def test_one_group_can_be_spelt_out(capsys, options, group):
    plans = [planned(capsys, *options), planned(capsys, "--group", group)]
    for printed in plans:  # the machine's memory may change between the two
        for figure in ("memory_available_bytes", "cgroup_available_bytes", "shm_free_bytes"):
            del printed[figure]
    assert plans[0] == plans[1]


def test_fewer_heads_than_ranks_are_held_twice(capsys):
    values = planned(capsys, "--group", "2:2:64", "--set", "world_size=4")
    assert values["engine_block_bytes_per_rank"] == 2 * 2 * 64 * 2 * 16


@pytest.mark.parametrize(("shared", "tensors"), [([], 3), (["--shared-tensors"], 2)])
def test_groups_may_share_tensors(capsys, shared, tensors):
    values = planned(capsys, "--group", "2:8:64", "--group", "1:8:64", *shared)
    page = 2 * 8 * 64 * 2 * 16
    assert values["group_block_bytes_per_rank"] == [2 * page, page]
    assert values["offloaded_block_bytes"] == tensors * page
    assert values["tokens_held"] == values["offloaded_blocks"] // 2 * 16


LLAMA = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "block_bytes"),
    [
        (LLAMA, 32 * 2 * 8 * 128 * 2 * 16),
        (DEEPSEEK, 61 * 576 * 2 * 16),
        ({"text_config": LLAMA, "torch_dtype": "float32"}, 32 * 2 * 8 * 128 * 2 * 16),
    ],
)
def test_geometry_is_read_from_a_models_config(tmp_path, capsys, model, block_bytes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    assert planned(capsys, "--model", str(path))["offloaded_block_bytes"] == block_bytes


def test_memory_that_is_not_there_is_exit_code_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    system = SystemPaths(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path, tmp_path)
    monkeypatch.setattr("kvoffload.cli.plan.plan", lambda config, model: plan(config, model, system))
    values = planned(capsys, "--group", "2:8:64", code=1)
    assert (values["fits"], values["memory_available_bytes"]) == (False, 1 << 20)


def test_a_file_is_read_and_a_table_printed(tmp_path, capsys):
    path = tmp_path / "offload.toml"
    path.write_text('cpu_bytes_to_use = "64MiB"\ngpu_block_size = 16\n')
    assert main(["plan", str(path), "--group", "32:8:128"]) == 0
    out = capsys.readouterr().out
    assert "offloaded block bytes" in out
    assert "2.0 MiB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "in one way: --model config.json, --layers"),
        (["--group", "32:8:128", "--layers", "32"], "in one way"),
        (["--layers", "32", "--kv-heads", "8"], "--layers 32 needs --kv-heads and --head-dim, or --latent-dim"),
        (["--group", "32:8:128", "--set", "cpu_bytes_to_use=1KiB"], "at least one offloaded block"),
        (["--group", "32:6:128", "--set", "world_size=4"], "6 KV heads cannot be cut over world_size 4"),
        (["--group", "32:8:128", "--set", "gpu_block_size=16,32"], "names 2 KV-cache groups"),
        (["--model", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, message, capsys):
    assert main(["plan", *SETTINGS, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("group", ["32", "32:8", "a:b:c", "0:8:128", "32:8:-1"])
def test_a_group_that_makes_no_sense_is_a_usage_mistake(group, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *SETTINGS, "--group", group])
    assert "LAYERS:KV_HEADS:HEAD_DIM" in capsys.readouterr().err
