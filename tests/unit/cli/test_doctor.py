"""`kvoffload doctor`: what it finds on machines that lack something, and what it advises."""

import errno
import fcntl
import importlib.metadata
import json
import os
import resource
import socket

import pytest
from fakes.cuda import FakeCuda

import kvoffload as kv
from kvoffload.cli import machine_checks
from kvoffload.cli.machine_checks import FAILURE, FEATURES, NOTE, OK, WARNING, Machine, check_all, feed_ports
from kvoffload.cli.main import main
from kvoffload.config import EventsConfig
from kvoffload.memory.preflight import SystemPaths
from kvoffload.transfer.cuda_driver import CudaDriver


@pytest.fixture
def system(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 1048576 kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "shm").mkdir()
    return SystemPaths(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "no-cgroups", tmp_path / "shm")


def no_driver():
    raise kv.errors.UnsupportedError("no CUDA driver on this machine")


def no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


def found(system, config=None, *, clean=False, **changes):
    changes = {"load_driver": no_driver, "version_of": lambda _: "2.13.0", "features": (), **changes}
    return {finding.name: finding for finding in check_all(Machine(system, **changes), config, clean=clean)}


def test_memory_is_compared_with_what_the_configuration_wants(system):
    small = kv.OffloadConfig(cpu_bytes_to_use="512MiB", gpu_block_size=16)
    large = kv.OffloadConfig(cpu_bytes_to_use="2GiB", gpu_block_size=16)
    assert found(system)["memory"].status == found(system, small)["memory"].status == OK
    finding = found(system, large)["memory"]
    assert (finding.status, finding.found) == (FAILURE, "1.0 GiB available, 2.0 GiB wanted")
    assert "cpu_bytes_to_use" in finding.advice


def test_the_tightest_cgroup_counts(system):
    system.cgroup_root.mkdir()
    for name, value in (("memory.max", 1 << 30), ("memory.current", 1 << 29), ("memory.stat", "")):
        (system.cgroup_root / name).write_text(f"{value}\n")
    config = kv.OffloadConfig(cpu_bytes_to_use="600MiB", gpu_block_size=16)
    finding = found(system, config)["cgroup memory"]
    assert finding.status == FAILURE
    assert finding.found == "512.0 MiB available, 600.0 MiB wanted"
    assert "container's memory limit" in finding.advice


def test_shared_memory_that_is_small_or_missing_is_a_warning(system, monkeypatch):
    monkeypatch.setattr("kvoffload.memory.preflight.shm_available_bytes", lambda _: 64 << 20)
    finding = found(system)["shared memory"]
    assert (finding.status, "64.0 MiB free" in finding.found, "--shm-size" in finding.advice) == (WARNING, True, True)
    monkeypatch.undo()
    system.shm.rmdir()
    assert found(system)["shared memory"].status == WARNING


@pytest.mark.parametrize(("limit", "status"), [(8 << 20, NOTE), (resource.RLIM_INFINITY, OK)])
def test_locked_memory(system, limit, status):
    finding = found(system, memlock=lambda: limit)["locked memory"]
    assert finding.status == status
    assert ("ulimit -l" in finding.advice) == (status == NOTE)


def test_missing_kernel_features_say_what_for(system):
    def missing(_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    finding = found(system, features=[("pidfd_open", missing, "ranks cannot be watched")])["pidfd_open"]
    assert (finding.status, finding.found, finding.advice) == (
        WARNING,
        "missing (ENOSYS)",
        "ranks cannot be watched",
    )


def test_every_feature_is_there_on_the_kernels_we_test_on(system):
    findings = found(SystemPaths(), features=FEATURES)
    assert {findings[name].status for name, _, _ in FEATURES} == {OK}


@pytest.mark.parametrize(("version", "status"), [(12080, OK), (12040, WARNING)])
def test_driver_and_batched_copies(system, version, status):
    findings = found(system, load_driver=lambda: CudaDriver(FakeCuda(version=version)))
    assert findings["cuda driver"].found == f"CUDA 12.{version // 10 % 100}"
    assert findings["batched copies"].status == status
    assert findings["gpus"].status == OK


def test_machine_without_a_driver_or_torch_is_fine(system):
    findings = found(system, version_of=no_package)
    assert findings["cuda driver"].status == findings["torch"].status == NOTE
    assert "install torch" in findings["torch"].advice


def test_everything_that_is_not_fine_says_what_to_do(system, monkeypatch):
    monkeypatch.setattr("kvoffload.memory.preflight.shm_available_bytes", lambda _: 1 << 20)
    (system.shm / "kvoffload_dead.mmap").write_bytes(b"x")
    config = kv.OffloadConfig(cpu_bytes_to_use="2GiB", gpu_block_size=16)
    findings = found(system, config, memlock=lambda: 1 << 20, version_of=no_package)
    wrong = {name: finding for name, finding in findings.items() if finding.status != OK}
    assert wrong.keys() >= {"memory", "shared memory", "locked memory", "cuda driver", "torch", "leftovers"}
    assert all(finding.advice for finding in wrong.values())


def test_versions_of_libraries_are_named(system):
    assert "numpy 2.13.0, pyzmq 2.13.0" in found(system)["libraries"].found
    assert found(system, version_of=no_package)["libraries"].found == "not installed as packages"


def test_leftovers_are_named_and_removed_when_asked_and_files_in_use_stay(system):
    dead, used = system.shm / "kvoffload_dead.mmap", system.shm / "kvoffload_used.mmap"
    for path in (dead, used):
        path.write_bytes(b"x" * 2048)
    fd = os.open(used, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    finding = found(system)["leftovers"]
    assert (finding.status, finding.found) == (WARNING, "1 files of dead processes, 2.0 KiB")
    assert "--clean" in finding.advice
    assert found(system, clean=True)["leftovers"].status == OK
    assert [path.name for path in system.shm.iterdir()] == [used.name]
    os.close(fd)


@pytest.mark.parametrize(("wanted", "status"), [(True, FAILURE), (False, WARNING)])
def test_ports_in_use_are_named(wanted, status):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        events = EventsConfig(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None)
        (finding,) = feed_ports(events, wanted=wanted)
    assert (finding.name, finding.status) == (f"feed port {port}", status)
    assert "events.endpoint" in finding.advice
    (finding,) = feed_ports(events, wanted=wanted)
    assert finding.status == OK


def test_feeds_that_bind_no_port_are_not_tried():
    connecting = EventsConfig(endpoint="tcp://10.0.0.1:5557", replay_endpoint=None, bind=False)
    local = EventsConfig(endpoint="ipc:///run/kv", replay_endpoint="tcp://127.0.0.1:0")
    assert [*feed_ports(connecting, wanted=True), *feed_ports(local, wanted=True), *feed_ports(None, wanted=True)] == []


def test_json_and_exit_code(system, tmp_path, monkeypatch, capsys):
    machine = Machine(system, load_driver=no_driver, features=())
    monkeypatch.setattr("kvoffload.cli.doctor.Machine", lambda: machine)
    path = tmp_path / "offload.toml"
    path.write_text('cpu_bytes_to_use = "4GiB"\ngpu_block_size = 16\n')
    assert main(["doctor", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"name": "leftovers", "status": "ok", "found": "none", "advice": ""} in report["checks"]
    path.write_text('cpu_bytes_to_use = "4MiB"\ngpu_block_size = 16\n')
    assert main(["doctor", str(path)]) == 0
    assert "1.0 GiB available" in capsys.readouterr().out


def test_brackets_in_a_finding_are_printed_as_they_are(system, monkeypatch, capsys):
    machine = Machine(system, load_driver=no_driver, features=(), version_of=no_package)
    monkeypatch.setattr("kvoffload.cli.doctor.Machine", lambda: machine)
    main(["doctor"])
    assert "kvoffload[torch]" in "".join(capsys.readouterr().out.split())


def test_a_configuration_that_cannot_be_read_is_exit_code_2(capsys):
    assert main(["doctor", "missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_statuses_are_words():
    assert {machine_checks.OK, machine_checks.NOTE, machine_checks.WARNING, machine_checks.FAILURE} == {
        "ok", "note", "warning", "failure",
    }  # fmt: skip
