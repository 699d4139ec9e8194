"""What `kvoffload doctor` looks at: one finding per thing on this machine, each with what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvoffload.cli.report import readable_bytes
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import UnsupportedError
from kvoffload.memory import preflight, shm_file
from kvoffload.transfer.cuda_driver import CudaDriver

State = Literal["ok", "note", "problem"]
_DOCKER_SHM = 64 << 20  # what containers get unless they are told otherwise
_POPULATE_KERNEL = (5, 14)  # MADV_POPULATE_WRITE
_LIBRARIES = ("kvoffload", "numpy", "pyzmq", "msgspec", "pydantic", "prometheus_client", "torch", "uvloop")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        state: `ok`, `note` (works, but worth knowing) or `problem`.
        found: What it is like.
        remedy: What to do about it; empty when there is nothing to do.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(
    config: OffloadConfig | None, *, clean: bool = False, system: preflight.SystemPaths = preflight.SYSTEM
) -> Iterator[Finding]:
    """Yield every finding.

    Args:
        config: Check for what it asks; None: for the defaults.
        clean: Remove what dead processes left.
        system: Where the kernel tells its numbers.
    """
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield from _libraries()
    yield from _memory(config, system)
    yield _shm(config, system)
    yield _memlock()
    yield _kernel(system)
    yield _gpu()
    yield from _ports(config)
    yield _leftovers(system, clean=clean)


def _libraries() -> Iterator[Finding]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if "torch" not in versions:
        yield Finding("torch", "note", "not installed: KV caches are numpy arrays", "install your torch for tensors")


def _memory(config: OffloadConfig | None, system: preflight.SystemPaths) -> Iterator[Finding]:
    asked = config.cpu_bytes_to_use if config is not None else 0
    for name, available in (
        ("memory", preflight.available_memory_bytes(system)),
        ("cgroup memory", preflight.cgroup_available_bytes(system)),
    ):
        if available is None:
            yield Finding(name, "ok", "no limit")
        elif asked > available:
            found = f"{readable_bytes(available)} available, cpu_bytes_to_use is {readable_bytes(asked)}"
            yield Finding(
                name, "problem", found, "lower cpu_bytes_to_use, or give the machine or container more memory"
            )
        else:
            yield Finding(name, "ok", f"{readable_bytes(available)} available")


def _shm(config: OffloadConfig | None, system: preflight.SystemPaths) -> Finding:
    try:
        free = preflight.shm_available_bytes(system)
    except OSError as error:
        return Finding(str(system.shm), "problem", f"cannot be used: {error.strerror}", "mount a tmpfs there")
    found = f"{readable_bytes(free)} free"
    remedy = "docker: --shm-size; Kubernetes: an emptyDir with medium Memory, mounted there"
    if config is not None and config.world_size > 1 and config.cpu_bytes_to_use > free:
        return Finding(str(system.shm), "problem", f"{found}, less than cpu_bytes_to_use of several ranks", remedy)
    if free <= _DOCKER_SHM:
        return Finding(str(system.shm), "note", f"{found}: the default of containers", f"for several ranks, {remedy}")
    return Finding(str(system.shm), "ok", found)


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock limit", "ok", "unlimited")
    remedy = "if pinning fails: ulimit -l unlimited, docker --ulimit memlock=-1; without it copies are slower"
    return Finding("memlock limit", "note", readable_bytes(soft), remedy)


def _kernel(system: preflight.SystemPaths) -> Finding:
    missing = []
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if version < _POPULATE_KERNEL:
        missing.append("MADV_POPULATE_WRITE (5.14)")
    try:
        os.close(os.memfd_create("kvoffload-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError:
        missing.append("memfd_create with seals")
    try:
        os.close(os.open(system.shm, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError:
        missing.append(f"O_TMPFILE in {system.shm}")
    if missing:
        return Finding("kernel", "note", f"lacks {', '.join(missing)}", "several ranks need a newer kernel or a tmpfs")
    return Finding("kernel", "ok", "populate, sealed memory files, nameless files")


def _gpu() -> Finding:
    try:
        driver = CudaDriver.load()
    except UnsupportedError as error:
        return Finding("GPU", "note", str(error), "the host back end works without one")
    version = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"
    if not driver.has_batch:
        return Finding("GPU", "note", f"driver for {version}, no batched copies", "drivers for CUDA 12.8 have them")
    return Finding("GPU", "ok", f"driver for {version}")


def _ports(config: OffloadConfig | None) -> Iterator[Finding]:
    events = config.events if config is not None else EventsConfig()
    if events is None:
        yield Finding("events feed", "ok", "switched off")
        return
    for endpoint in (events.endpoint, events.replay_endpoint):
        host, _, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
        if endpoint is None or not endpoint.startswith("tcp://") or not port.isdigit():
            continue
        taken = _why_taken(host, int(port) + events.dp_rank)
        if taken:
            yield Finding(
                "events feed", "problem", f"{endpoint}: {taken}", "choose another port, or 0 for any free one"
            )
        else:
            yield Finding("events feed", "ok", f"{endpoint} is free")


def _why_taken(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host.strip("[]"), port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _leftovers(system: preflight.SystemPaths, *, clean: bool) -> Finding:
    files = shm_file.find_leftovers(system, remove=clean) if Path(system.shm).is_dir() else []
    if not files:
        return Finding("leftovers", "ok", "none of dead processes")
    found = ", ".join(f"{file.path.name} ({readable_bytes(file.size_bytes)})" for file in files)
    if clean:
        return Finding("leftovers", "ok", f"removed {found}")
    return Finding("leftovers", "problem", found, "kvoffload doctor --clean removes them; files in use are left alone")
