"""What `kvoffload doctor` looks at. Each check returns what it found, and what to do about it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import KVOffloadError
from kvoffload.memory import preflight
from kvoffload.memory.populate import MADV_POPULATE_WRITE
from kvoffload.memory.shm_file import find_leftovers
from kvoffload.transfer.cuda_driver import CudaDriver

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"
_SMALL_SHM_BYTES = 1 << 30
_LIBRARIES = ("kvoffload", "numpy", "pyzmq", "msgspec", "pydantic", "prometheus_client", "uvloop")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was looked at.
        status: `"ok"`; `"note"`: nothing is wrong; `"warning"`: something will not work, or not well; `"failure"`.
        found: What is there.
        advice: What to do; empty when there is nothing to do.
    """

    name: str
    status: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks look; tests put their own here.

    Attributes:
        system: The kernel's files.
        memlock: Soft limit of locked memory in bytes; -1: none.
        load_driver: Loads the CUDA driver, or raises `UnsupportedError`.
        features: Kernel features by name: a probe that raises OSError where the feature is missing, and what for.
        version_of: Version of an installed package; raises `PackageNotFoundError`.
    """

    system: preflight.SystemPaths = preflight.SYSTEM
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    load_driver: Callable[[], CudaDriver] = CudaDriver.load
    features: Sequence[tuple[str, Callable[[preflight.SystemPaths], None], str]] = field(
        default_factory=lambda: FEATURES
    )
    version_of: Callable[[str], str] = importlib.metadata.version


def check_all(machine: Machine, config: OffloadConfig | None, *, clean: bool = False) -> Iterator[Finding]:
    """Yield every finding.

    Args:
        machine: Where to look.
        config: What is wanted of it; None: only what holds for every configuration.
        clean: Remove the leftovers of dead processes.
    """
    yield Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield libraries(machine)
    yield from memory(machine, config)
    yield shared_memory(machine.system)
    yield locked_memory(machine.memlock())
    yield from kernel_features(machine)
    yield from device(machine)
    yield leftovers(machine.system, clean=clean)
    yield from feed_ports(config.events if config is not None else EventsConfig(), wanted=config is not None)


def libraries(machine: Machine) -> Finding:
    """Name the versions of what kvoffload is built on."""
    versions = []
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {machine.version_of(name)}")
    return Finding("libraries", OK, ", ".join(versions) or "not installed as packages")


def memory(machine: Machine, config: OffloadConfig | None) -> Iterator[Finding]:
    """Compare what is available with what is wanted."""
    wanted = config.cpu_bytes_to_use if config is not None else 0
    sources = (
        ("memory", preflight.available_memory_bytes(machine.system), "ask for less: lower cpu_bytes_to_use"),
        ("cgroup memory", preflight.cgroup_available_bytes(machine.system), "raise the container's memory limit"),
    )
    for name, available, advice in sources:
        if available is None:
            yield Finding(name, OK if name == "cgroup memory" else NOTE, "no limit" if "cg" in name else "not known")
        elif wanted > available:
            yield Finding(name, FAILURE, f"{_size(available)} available, {_size(wanted)} wanted", advice)
        else:
            yield Finding(name, OK, f"{_size(available)} available" + (f", {_size(wanted)} wanted" if wanted else ""))


def shared_memory(system: preflight.SystemPaths) -> Finding:
    """Look at the tmpfs that ranks use when they can only meet by a name."""
    enlarge = "enlarge it where ranks meet by a name: docker run --shm-size, or an emptyDir of medium Memory"
    try:
        free = preflight.shm_available_bytes(system)
    except OSError as error:
        return Finding("shared memory", WARNING, f"{system.shm}: {error.strerror}", f"mount a tmpfs at {system.shm}")
    if free < _SMALL_SHM_BYTES:
        return Finding("shared memory", WARNING, f"{system.shm} has {_size(free)} free", enlarge)
    return Finding("shared memory", OK, f"{system.shm} has {_size(free)} free")


def locked_memory(limit: int) -> Finding:
    """Look at the limit of locked memory."""
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", OK, "no limit")
    return Finding(
        "locked memory",
        NOTE,
        f"limit {_size(limit)}",
        "with a GPU: ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )


def kernel_features(machine: Machine) -> Iterator[Finding]:
    """Try each feature."""
    for name, probe, purpose in machine.features:
        try:
            probe(machine.system)
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0, "") or str(error)
            yield Finding(name, WARNING, f"missing ({why})", purpose)
        else:
            yield Finding(name, OK, "there")


def device(machine: Machine) -> Iterator[Finding]:
    """Look for a GPU, its driver and the libraries that use it."""
    try:
        driver = machine.load_driver()
    except KVOffloadError as error:
        yield Finding("cuda driver", NOTE, str(error), "KV caches in host memory work without one")
    else:
        major, minor = divmod(driver.version, 1000)
        version = f"CUDA {major}.{minor // 10}"
        yield Finding("cuda driver", OK, version)
        if driver.has_batch:
            yield Finding("batched copies", OK, "there")
        else:
            yield Finding(
                "batched copies", WARNING, f"missing in {version}", "update the driver to CUDA 12.8: copies are slower"
            )
        count = ctypes.c_int()
        try:
            driver.call("cuDeviceGetCount", ctypes.byref(count))
        except KVOffloadError as error:
            yield Finding("gpus", FAILURE, str(error), "the driver is there, but cannot count its devices: nvidia-smi")
        else:
            hint = "" if count.value else "the driver sees none: check CUDA_VISIBLE_DEVICES and the container's devices"
            yield Finding("gpus", OK if count.value else WARNING, str(count.value), hint)
    try:
        yield Finding("torch", OK, machine.version_of("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", NOTE, "not installed", "with torch tensors: install torch, then kvoffload[torch]")


def leftovers(system: preflight.SystemPaths, *, clean: bool) -> Finding:
    """Look for files of processes that are gone."""
    try:
        found = find_leftovers(system, remove=clean)
    except OSError as error:
        return Finding("leftovers", WARNING, str(error))
    if not found:
        return Finding("leftovers", OK, "none")
    what = f"{len(found)} files of dead processes, {_size(sum(left.size_bytes for left in found))}"
    if clean:
        return Finding("leftovers", OK, f"removed {what}")
    return Finding("leftovers", WARNING, what, "kvoffload doctor --clean removes them; those in use are left alone")


def feed_ports(events: EventsConfig | None, *, wanted: bool) -> Iterator[Finding]:
    """Try the ports that the events feed would bind."""
    if events is None:
        return
    for key, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        parts = urlsplit(endpoint or "")
        if parts.scheme != "tcp" or not parts.port or events.bind is False:
            continue
        host = "0.0.0.0" if parts.hostname in {"*", None} else str(parts.hostname)  # noqa: S104 - as it would be bound
        port = parts.port + events.dp_rank
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            status = FAILURE if wanted else WARNING
            advice = f"end what uses it (ss -ltnp 'sport = :{port}'), or set events.{key}"
            yield Finding(f"feed port {port}", status, f"{host}: {error.strerror or error}", advice)
        else:
            yield Finding(f"feed port {port}", OK, "free")


# ---- probes


def _memfd(_: preflight.SystemPaths) -> None:
    fd = os.memfd_create("kvoffload-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    finally:
        os.close(fd)


def _pidfd(_: preflight.SystemPaths) -> None:
    os.close(os.pidfd_open(os.getpid()))


def _populate(_: preflight.SystemPaths) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page.madvise(MADV_POPULATE_WRITE)


def _unnamed_file(system: preflight.SystemPaths) -> None:
    os.close(os.open(system.shm, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _byte_locks(system: preflight.SystemPaths) -> None:
    fd = os.open(system.shm, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    finally:
        os.close(fd)


def _eventfd(_: preflight.SystemPaths) -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC))


FEATURES: Sequence[tuple[str, Callable[[preflight.SystemPaths], None], str]] = (
    ("memfd_create with seals", _memfd, "Linux 3.17: ranks cannot share a region without a name"),
    ("pidfd_open", _pidfd, "Linux 5.3: ranks in other processes cannot be watched"),
    ("MADV_POPULATE_WRITE", _populate, "Linux 5.14: starting takes longer, pages are touched one by one"),
    ("O_TMPFILE in shared memory", _unnamed_file, "it must be a tmpfs: ranks cannot meet by a name"),
    ("locks of bytes", _byte_locks, "Linux 3.15: ranks cannot meet by a name"),
    ("eventfd", _eventfd, "Linux 2.6.27: nothing works without it"),
)


def _size(size: float) -> str:
    from kvoffload.cli.report import readable_bytes

    return readable_bytes(size)
