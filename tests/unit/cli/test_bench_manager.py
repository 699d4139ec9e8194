import json

import pytest

from kvoffload.cli.bench_manager import fill, make_keys, measure_longest
from kvoffload.cli.bench_manager_peers import OrderedDictPeer, OwnPeer
from kvoffload.cli.main import main


def test_every_part_is_reported_for_every_manager(capsys):
    sizes = "--blocks 600 --rounds 1 --operations 3000 --replay-capacity 50"
    code = main(["bench", "manager", *sizes.split(), "--policies", "lru,arc", "--json"])
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    names = {"kvoffload_lru", "kvoffload_arc", "ordereddict_lru"}
    for part in ("pins", "longest", "memory", "replay"):
        assert set(result[part]) == names, part
    assert set(result["calls"]["ns_per_block"]["store_64"]) == names
    assert set(result["calls"]["ns_per_block"]["lookup_64"]) == {*names, "dict_get_floor"}
    assert result["calls"]["times_faster_kvoffload_lru"]["touch_1"]["ordereddict_lru"] > 0
    assert result["replay"]["kvoffload_lru"]["hit_ratio"] == result["replay"]["ordereddict_lru"]["hit_ratio"]
    assert result["replay"]["kvoffload_lru"]["request_p999_us"] > 0


def test_each_pass_makes_the_same_calls_and_the_repeatable_figure_is_their_least(monkeypatch):
    seconds = iter([[1.0, 9.0], [5.0, 2.0], [1.5, 3.0]])

    def scripted(*_):
        return ["touch", "store"], next(seconds), 0.0

    monkeypatch.setattr("kvoffload.cli.bench_manager._longest_pass", scripted)
    row = measure_longest({"own": lambda blocks: OwnPeer("lru", blocks)}, [], 4, 1, seed=0, passes=3)["own"]
    assert row == {
        "longest_ms": 9000.0,
        "repeatable_ms": 2000.0,
        "touch_ms": 1000.0,
        "store_ms": 2000.0,
        "collector_ms": 0.0,
    }


def test_passes_agree_on_the_calls(capsys):
    line = "--blocks 600 --operations 3000 --policies lru,arc --parts longest --passes 2 --json"
    assert main(["bench", "manager", *line.split()]) == 0
    for row in json.loads(capsys.readouterr().out)["longest"].values():
        assert 0 < row["repeatable_ms"] <= row["longest_ms"]


def test_tables_name_the_part(capsys):
    assert main(["bench", "manager", "--blocks", "200", "--rounds", "1", "--parts", "memory,calls"]) == 0
    out = capsys.readouterr().out
    assert "memory" in out
    assert "ns_per_block" in out


def test_folder_without_a_vllm_wheel_is_a_usage_mistake(capsys, tmp_path):
    assert main(["bench", "manager", "--blocks", "10", "--vllm-path", str(tmp_path)]) == 2
    assert "no unpacked vLLM wheel" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0, 90])
def test_peers_decide_alike(share):
    keys = make_keys(60, seed=1)
    own, plain = OwnPeer("lru", 20), OrderedDictPeer(20)
    for peer in (own, plain):
        fill(peer, keys[:20])
        peer.touch(keys[:10])
        pinned = peer.pin(keys[: 20 * share // 100]) if share else None
        assert peer.store(keys[15:30]) == (10 if not share else -1)
        if share:
            peer.unpin(keys[:18], pinned)
    assert [own.lookup([key]) for key in keys] == [plain.lookup([key]) for key in keys]
