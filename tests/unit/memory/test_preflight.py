"""Checks before allocation read the kernel's numbers and name both sides of a refusal."""

import dataclasses

import pytest

from kvoffload.errors import NoSpaceError
from kvoffload.memory import preflight
from kvoffload.memory.host_memory import allocate_host_tensors

MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "fs").mkdir()
    return preflight.SystemPaths(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs", tmp_path)


def group(path, *, limit, usage, stat="", names=("memory.max", "memory.current")):
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{usage}\n")
    (path / "memory.stat").write_text(stat)


def test_machine_memory_is_checked(system):
    preflight.check_memory(4 * MIB, "host tensors", system)
    with pytest.raises(NoSpaceError, match=r"host tensors: 4194305 bytes needed, the machine has 4194304") as caught:
        preflight.check_memory(4 * MIB + 1, "host tensors", system)
    assert (caught.value.requested_bytes, caught.value.available_bytes) == (4 * MIB + 1, 4 * MIB)


def test_cgroup_v2_limit_of_any_level_counts_and_reclaimable_cache_is_free(system):
    (system.self_cgroup).write_text("0::/pod/container\n")
    group(system.cgroup_root / "pod", limit=3 * MIB, usage=2 * MIB, stat="anon 5\ninactive_file 1048576\n")
    group(system.cgroup_root / "pod" / "container", limit="max", usage=MIB)
    assert preflight.cgroup_available_bytes(system) == 2 * MIB
    with pytest.raises(
        NoSpaceError, match=f"the cgroup allows {2 * MIB} available: raise the container's memory limit"
    ):
        preflight.check_memory(3 * MIB, "host tensors", system)


def test_cgroup_namespace_reads_the_mounts_root(system):
    (system.self_cgroup).write_text("0::/not/visible/here\n")
    group(system.cgroup_root, limit=2 * MIB, usage=3 * MIB)
    assert preflight.cgroup_available_bytes(system) == 0


def test_cgroup_v1_limit_counts_and_its_huge_number_means_none(system):
    (system.self_cgroup).write_text("5:cpu:/x\n4:memory:/box\n0::/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(system.cgroup_root / "memory", limit=9223372036854771712, usage=MIB, names=names)
    assert preflight.cgroup_available_bytes(system) is None
    stat = "total_inactive_file 1024\n"
    group(system.cgroup_root / "memory" / "box", limit=2 * MIB, usage=MIB, stat=stat, names=names)
    assert preflight.cgroup_available_bytes(system) == MIB + 1024


def test_without_numbers_nothing_is_refused(tmp_path):
    nowhere = preflight.SystemPaths(tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path)
    assert preflight.available_memory_bytes(nowhere) is None
    assert preflight.cgroup_available_bytes(nowhere) is None
    preflight.check_memory(1 << 60, "host tensors", nowhere)


def test_shared_memory_space_is_checked(system, monkeypatch):
    free = preflight.shm_available_bytes(system)
    with pytest.raises(NoSpaceError, match="--shm-size") as caught:
        preflight.check_shm(free * 2, "region", system)
    assert str(system.shm) in str(caught.value)


def test_this_machine_tells_its_memory():
    assert preflight.available_memory_bytes() > 0


def test_refused_allocation_names_both_numbers(system):
    with pytest.raises(NoSpaceError) as caught:
        allocate_host_tensors([MIB], 5, system=dataclasses.replace(system))
    assert (caught.value.requested_bytes, caught.value.available_bytes) == (5 * MIB, 4 * MIB)
