"""`kvoffload plan`: bytes before anything is allocated."""

import json

import pytest

from kvoffload.cli.main import main
from kvoffload.cli.plan import make_plan
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError


def write(tmp_path, **values):
    path = tmp_path / "kvoffload.json"
    path.write_text(json.dumps({"cpu_bytes_to_use": "1GiB", "gpu_block_size": 16, **values}))
    return str(path)


def planned(capsys, *arguments):
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_heads_are_shared_by_the_ranks(tmp_path, capsys):
    path = write(tmp_path, world_size=2, block_size=64)
    code, plan = planned(capsys, path, "--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    engine_block = 32 * 16 * (2 * 4 * 128 * 2)
    assert code == 0
    assert plan["bytes_per_engine_block_and_rank"] == {"group_0_bytes": engine_block}
    assert plan["bytes_per_offloaded_block_and_rank"] == engine_block * 4
    assert plan["bytes_per_offloaded_block"] == engine_block * 8
    assert plan["offloaded_blocks"] == (1 << 30) // (engine_block * 8)
    assert plan["tokens"] == plan["offloaded_blocks"] * 64
    assert plan["total_bytes"] + plan["unused_bytes"] == 1 << 30
    assert plan["bytes_per_rank"] * 2 == plan["total_bytes"]


def test_fewer_heads_than_ranks_means_one_on_each(tmp_path, capsys):
    path = write(tmp_path, world_size=8)
    _, plan = planned(capsys, path, "--layers", "1", "--kv-heads", "2", "--head-dim", "64", "--dtype", "fp8")
    assert plan["bytes_per_engine_block_and_rank"]["group_0_bytes"] == 16 * 2 * 64


def test_groups_add_up():
    config = OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=(16, 32))
    plan = make_plan(config, [2, 3], 10)
    assert plan.group_bytes == (320, 960)
    assert plan.block_bytes == 1280
    with pytest.raises(ConfigError, match="2 groups"):
        make_plan(config, [2], 10)


def test_memory_that_the_machine_lacks_is_a_failure(tmp_path, capsys):
    path = write(tmp_path, cpu_bytes_to_use=str(1 << 50))
    code, plan = planned(capsys, path, "--layers", "1", "--token-bytes", "1KiB")
    assert (code, plan["fits_this_machine"]) == (1, False)


@pytest.mark.parametrize("arguments", [["--layers", "1"], ["--layers", "1", "--kv-heads", "8"]])
def test_missing_sizes_are_named(tmp_path, capsys, arguments):
    assert main(["plan", write(tmp_path), *arguments]) == 2
    assert "--kv-heads and --head-dim, or --token-bytes" in capsys.readouterr().err


def test_the_table_is_for_people(tmp_path, capsys):
    assert main(["plan", write(tmp_path), "--layers", "2", "--token-bytes", "1KiB"]) == 0
    assert "offloaded blocks" in capsys.readouterr().out
