"""`kvoffload doctor`: this machine, and machines that lack something."""

import json
import socket

import pytest

from kvoffload.cli.machine import examine
from kvoffload.cli.main import main
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.memory.preflight import SystemPaths


@pytest.fixture
def system(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable:    1048576 kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "root").mkdir()
    (tmp_path / "shm").mkdir()
    return SystemPaths(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "root", tmp_path / "shm")


def free_endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def found(system, config=None, **options):
    return {finding.name: finding for finding in examine(config, system=system, **options)}


def config(**changes):
    return OffloadConfig(**{"cpu_bytes_to_use": "64MiB", "gpu_block_size": 16, **changes})


def test_every_note_and_problem_says_what_to_do(system):
    for finding in found(system, config(cpu_bytes_to_use="8GiB")).values():
        assert finding.found
        assert (finding.state == "ok") == (not finding.remedy)


def test_memory_below_the_configuration_is_a_problem(system):
    assert found(system, config())["memory"].state == "ok"
    finding = found(system, config(cpu_bytes_to_use="8GiB"))["memory"]
    assert (finding.state, finding.found) == ("problem", "1.0 GiB available, cpu_bytes_to_use is 8.0 GiB")


def test_the_cgroups_limit_counts(system):
    (system.cgroup_root / "memory.max").write_text("100000000\n")
    (system.cgroup_root / "memory.current").write_text("90000000\n")
    (system.cgroup_root / "memory.stat").write_text("inactive_file 0\n")
    assert found(system, config())["cgroup memory"].state == "problem"


def test_a_missing_shm_is_a_problem(system):
    system.shm.rmdir()
    assert found(system)[str(system.shm)].state == "problem"


def test_leftovers_of_dead_processes_are_found_and_removed_on_request(system):
    left = system.shm / "kvoffload_dead.mmap"
    left.write_bytes(b"x" * 2048)
    finding = found(system)["leftovers"]
    assert (finding.state, finding.found) == ("problem", "kvoffload_dead.mmap (2.0 KiB)")
    assert left.exists()
    assert found(system, clean=True)["leftovers"].found.startswith("removed")
    assert not left.exists()


def test_a_taken_port_is_a_problem_and_port_0_is_not_looked_at(system):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        findings = list(examine(config(events=EventsConfig(endpoint=taken, replay_endpoint=None)), system=system))
    assert [finding.state for finding in findings if finding.name == "events feed"] == ["problem"]
    free = EventsConfig(endpoint=free_endpoint(), replay_endpoint=None)
    assert found(system, config(events=free))["events feed"].state == "ok"
    assert "switched off" in found(system, config())["events feed"].found


def test_json_and_exit_code_agree(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"cpu_bytes_to_use": str(1 << 50), "gpu_block_size": 16}))
    assert main(["doctor", str(path), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["problems"] >= 1
    assert {finding["state"] for finding in values["findings"]} <= {"ok", "note", "problem"}


def test_the_table_names_this_machine(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "gpu_block_size": 16}))
    main(["doctor", str(path)])
    assert "/dev/shm" in capsys.readouterr().out
