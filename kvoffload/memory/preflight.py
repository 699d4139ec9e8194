"""Checks before memory is allocated: an error with two numbers instead of an OOM kill or a SIGBUS later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvoffload.errors import NoSpaceError


@dataclass(frozen=True, slots=True)
class SystemPaths:
    """Where the kernel tells its numbers; tests put their own files here.

    Attributes:
        meminfo: `/proc/meminfo`.
        self_cgroup: `/proc/self/cgroup`.
        cgroup_root: Where cgroup v2, or v1's `memory` controller below it, is mounted.
        shm: The tmpfs for named shared memory.
    """

    meminfo: Path = Path("/proc/meminfo")
    self_cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")  # noqa: S108 - the kernel's place for it


SYSTEM = SystemPaths()


def available_memory_bytes(system: SystemPaths = SYSTEM) -> int | None:
    """Return the machine's MemAvailable; None if the kernel does not tell."""
    for line in _read(system.meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_available_bytes(system: SystemPaths = SYSTEM) -> int | None:
    """Return what this process's cgroup and those above it still allow, the tightest one; None without a limit.

    File cache that is easy to reclaim counts as available. Both versions are read; with a cgroup namespace the own
    group is the mount's root.
    """
    v2, v1 = "/", "/"
    for line in _read(system.self_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    found = [
        *_limits(system.cgroup_root, v2, ("memory.max", "memory.current", "inactive_file")),
        *_limits(
            system.cgroup_root / "memory", v1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        ),
    ]
    return min(found, default=None)


def shm_available_bytes(system: SystemPaths = SYSTEM) -> int:
    """Return the free bytes of the shared-memory file system."""
    stat = os.statvfs(system.shm)
    return stat.f_bavail * stat.f_frsize


def check_memory(requested_bytes: int, what: str, system: SystemPaths = SYSTEM) -> None:
    """Refuse an allocation that the machine or the cgroup cannot hold.

    Raises:
        NoSpaceError: With the requested and the available bytes.
    """
    limits = [
        ("the machine has", available_memory_bytes(system), "ask for fewer CPU blocks (cpu_bytes_to_use)"),
        ("the cgroup allows", cgroup_available_bytes(system), "raise the container's memory limit, or ask for less"),
    ]
    for who, available, remedy in limits:
        if available is not None and requested_bytes > available:
            raise NoSpaceError(
                f"{what}: {requested_bytes} bytes needed, {who} {available} available: {remedy}",
                requested_bytes=requested_bytes,
                available_bytes=available,
            )


def check_shm(requested_bytes: int, what: str, system: SystemPaths = SYSTEM) -> None:
    """Refuse a shared region that its file system cannot hold.

    Raises:
        NoSpaceError: With the path, the requested and the available bytes.
    """
    available = shm_available_bytes(system)
    if requested_bytes > available:
        raise NoSpaceError(
            f"{what}: {requested_bytes} bytes needed, {system.shm} has {available} free: "
            "enlarge it (docker run --shm-size, an emptyDir of medium Memory), or ask for less",
            requested_bytes=requested_bytes,
            available_bytes=available,
        )


def _limits(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Return what each group from `path` up to the root still allows."""
    limit_name, usage_name, reclaimable_name = names
    directory = root / path.lstrip("/")
    if not directory.is_dir():
        directory = root
    found = []
    while True:
        limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:  # v1 writes a huge number for "none"
            stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
            found.append(max(0, int(limit) - int(usage) + int(stat.get(reclaimable_name, 0))))
        if directory == root:
            return found
        directory = directory.parent


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
