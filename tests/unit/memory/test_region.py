"""The shared region: views, offsets, named and unnamed life cycle, errors, cleanup. Reference, chapter 8."""

import ctypes
import errno
import fcntl
import gc
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import ClosedError, LayoutError, NoSpaceError, UnsupportedError, UsageError
from kvoffload.memory import preflight, shm_file
from kvoffload.memory.block_tensor import as_block_tensor
from kvoffload.memory.canonical import CanonicalKVCaches, torch_view
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.memory.shm_file import find_leftovers
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers

MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    """Files of one test below /dev/shm, so that tests cannot meet."""
    directory = Path("/dev/shm") / f"kvoffload-test-{os.getpid()}-{tmp_path.name[-8:]}"
    directory.mkdir()
    yield preflight.SystemPaths(shm=directory)
    left = sorted(path.name for path in directory.iterdir())
    shutil.rmtree(directory)
    assert left == []


@pytest.fixture
def make(system):
    """Make regions of 4 blocks x 2 ranks x 100 bytes that are cleaned up at the end."""
    regions = []

    def make_region(rank=0, *, num_workers=2, num_blocks=4, page=100, total=None, name="one", **kwargs):
        total = total or num_blocks * num_workers * page
        region = SharedOffloadRegion(name, total, num_blocks, rank, num_workers, page, system=system, **kwargs)
        regions.append(region)
        return region

    yield make_region
    for region in regions:
        region.cleanup()


def names(system):
    return sorted(path.name for path in system.shm.iterdir())


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- views


def test_views_are_interleaved_rows_as_in_the_reference(make):
    first, second = make(0), make(1)
    a, b = first.create_next_view(60), first.create_next_view(40)
    c = second.create_next_view(100)
    assert (a.shape, a.strides, a.dtype) == ((4, 60), (200, 1), np.int8)
    a[:], b[:], c[:] = 1, 2, 3
    row = [1] * 60 + [2] * 40 + [3] * 100
    assert first.whole().tolist() == second.whole().tolist() == [row] * 4


def test_share_of_a_row_can_be_filled_exactly_and_not_exceeded(make):
    region = make(1)
    region.create_next_view(99)
    with pytest.raises(UsageError, match="pages of 2 bytes does not fit: rank 1 has 1 of its 100 bytes a row left"):
        region.create_next_view(2)
    assert region.create_next_view(1).shape == (4, 1)
    with pytest.raises(UsageError, match="rank 1 has 0"):
        region.create_next_view(1)


def test_without_a_rank_there_is_the_whole_and_no_share(make):
    region = make(None)
    assert region.whole().shape == (4, 200)
    with pytest.raises(UsageError, match="without a rank"):
        region.create_next_view(1)


def test_views_serve_as_cpu_tensors_of_handlers_and_as_torch_tensors(make):
    torch = pytest.importorskip("torch")
    from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec

    region = make(1, page=96)
    gpu = np.random.default_rng(0).integers(-128, 128, (8, 48), np.int8)
    view = region.create_next_view(96)
    pair = CpuGpuOffloadingHandlers(CanonicalKVCaches.from_layers({"a": gpu}), 2, 4, cpu_tensors=[view])
    pair.gpu_to_cpu_handler.transfer_async(1, (GPULoadStoreSpec([5, 6, 7], [3], [0]), CPULoadStoreSpec([3, 1])))
    assert pair.gpu_to_cpu_handler.wait({1}, 5)
    pair.shutdown()
    assert np.array_equal(view[3], np.concatenate([gpu[5], gpu[6]]))
    assert np.array_equal(view[1, :48], gpu[7])
    tensor = torch_view(as_block_tensor(view))
    assert torch.equal(tensor[3, :48], torch.from_numpy(gpu[5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, r"rank 2 in 0..1"),
        ({"rank": -1}, r"rank -1"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"total": 799}, "total_size_bytes must be at least 800, for 4 blocks of 2 x 100 bytes; got 799"),
        ({"name": "../one"}, "instance_id '../one' must be"),
        ({"name": ""}, "instance_id ''"),
    ],
)
def test_sizes_and_names_that_make_no_sense_are_usage_errors(make, system, arguments, message):
    with pytest.raises(UsageError, match=message):
        make(**{"rank": 0, **arguments})
    assert names(system) == []


# ---- the named life cycle


def test_name_is_there_until_all_ranks_have_mapped(make, system):
    first = make(0)
    assert names(system) == ["kvoffload_one.mmap"]
    assert first.is_creator
    assert not make(1).is_creator
    assert names(system) == []


def test_name_can_be_kept_and_the_last_to_leave_removes_it(make, system):
    first, second = make(0, keep_name=True), make(1, keep_name=True)
    first.cleanup()
    assert names(system) == ["kvoffload_one.mmap"]
    make(0, keep_name=True).whole()[0, 0] = 9  # rejoins the same memory
    assert second.whole()[0, 0] == 9
    second.cleanup()


def test_other_size_under_the_same_name_names_both(make):
    make(0)
    with pytest.raises(LayoutError, match=r"has 800 bytes, this process expects 1600.*same configuration"):
        make(1, num_blocks=8)


def test_rank_that_a_live_process_holds_is_refused(make):
    first = make(0)
    with pytest.raises(UsageError, match="rank 0 is taken by another live process"):
        make(0)
    first.cleanup()
    make(0)


def test_leftover_of_a_dead_process_is_replaced_not_adopted(make, system):
    stale = system.shm / "kvoffload_one.mmap"
    stale.write_bytes(b"x" * 800)
    region = make(0)
    assert region.is_creator
    assert not region.whole().any()


def test_next_region_of_any_name_sweeps_leftovers_and_leaves_what_is_in_use(make, system):
    make(0)
    (system.shm / "kvoffload_dead.mmap").write_bytes(b"x" * 4096)
    (system.shm / "kvoffload_dead.lock").touch()
    SharedOffloadRegion("two", 800, 4, 0, 2, 100, system=system).cleanup()
    assert names(system) == ["kvoffload_one.mmap"]


def test_leftovers_are_found_and_files_in_use_are_not(make, system):
    make(0)
    (system.shm / "kvoffload_dead.mmap").write_bytes(b"x" * 4096)
    (system.shm / "kvoffload_dead.lock").touch()
    (system.shm / "other_dead.mmap").touch()
    assert [(left.path.name, left.size_bytes) for left in find_leftovers(system)] == [
        ("kvoffload_dead.lock", 0),
        ("kvoffload_dead.mmap", 4096),
    ]
    assert len(find_leftovers(system, remove=True)) == 2
    assert names(system) == ["kvoffload_one.mmap", "other_dead.mmap"]
    (system.shm / "other_dead.mmap").unlink()


def test_many_ranks_starting_at_once_share_one_region(make, system):
    regions, errors = [None] * 8, []

    def start(rank):
        try:
            regions[rank] = make(rank, num_workers=8, num_blocks=64, page=1000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(region.is_creator for region in regions) == 1
    for rank, region in enumerate(regions):
        region.create_next_view(1000)[:] = rank
    assert (regions[0].whole() == np.repeat(np.arange(8), 1000)).all()
    assert names(system) == []


def test_joiner_gives_up_on_a_creator_that_takes_too_long(make, system):
    with shm_file._only_one(system.shm / "kvoffload_one.lock", 1), pytest.raises(ClosedError, match=r"more than 0\.05"):
        make(0, timeout=0.05)


def test_progress_covers_reserving_and_populating(make):
    seen = []
    make(0, num_blocks=2048, page=4096, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(16 * MIB, 16 * MIB), (4 * MIB, 8 * MIB), (8 * MIB, 8 * MIB)]


# ---- too little space


def test_too_little_space_is_told_before_mapping_and_the_joiner_fails_too(make, system, monkeypatch):
    """A-S2."""
    monkeypatch.setattr(preflight, "shm_available_bytes", lambda system: MIB)
    failures = []

    def start(rank):
        begin = time.monotonic()
        try:
            make(rank, num_blocks=1, page=MIB)
        except NoSpaceError as error:
            failures.append((error, time.monotonic() - begin))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 2
    for error, seconds in failures:
        assert (error.requested_bytes, error.available_bytes) == (2 * MIB, MIB)
        assert str(system.shm) in str(error)
        assert seconds < 2
    assert names(system) == []


def test_space_that_runs_out_while_reserving_is_told_and_leaves_nothing(make, system, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = open_fds()
    with pytest.raises(NoSpaceError, match="800 bytes needed, room for 0 found"):
        make(0)
    assert names(system) == []
    assert open_fds() == fds


SMALL = """
import sys
from pathlib import Path
from kvoffload.errors import NoSpaceError
from kvoffload.memory import preflight
from kvoffload.memory.region import SharedOffloadRegion
preflight.check_shm = lambda *args: None  # another process took the space after the check
shm = Path(sys.argv[1])
try:
    SharedOffloadRegion("x", 2 << 20, 2, 0, 1, 1 << 20, system=preflight.SystemPaths(shm=shm))
except NoSpaceError as error:
    print(error.requested_bytes, list(shm.iterdir()))
"""


def test_full_tmpfs_is_an_error_and_no_sigbus(tmp_path):
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare(1) with user namespaces, to mount a small tmpfs")
    command = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", command, sys.executable, SMALL], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (f"{2 * MIB} []\n", 0), done.stderr


def test_file_system_without_unnamed_files_is_unsupported(make, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(UnsupportedError, match="must be a tmpfs"):
        make(0)


def test_directory_that_cannot_be_used_is_unsupported(tmp_path):
    nowhere = preflight.SystemPaths(shm=tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match=r"kvoffload_one\.mmap cannot be shared"):
        SharedOffloadRegion("one", 800, 4, 0, 2, 100, system=nowhere)


# ---- cleanup


def test_view_outlives_cleanup_without_a_fault_and_memory_goes_with_it(make, system, caplog):
    """A-S3."""
    gc.collect()
    fds = open_fds()
    region = make(0)
    view = region.create_next_view(100)
    held = memoryview(view)
    view[:] = 5
    with caplog.at_level(logging.WARNING):
        assert region.cleanup() is False
    assert "stays mapped until the last view is gone" in caplog.text
    assert (view == 5).all()
    assert held[0, 0] == 5
    assert open_fds() == fds
    assert names(system) == []
    assert region.cleanup() is True
    address = view.ctypes.data
    del view, held
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_cleaned_up_region_refuses_use(make):
    region = make(0)
    assert region.cleanup() is True
    for use in (region.whole, region.fileno, lambda: region.create_next_view(1), lambda: region.pin(None)):
        with pytest.raises(ClosedError, match="cleaned up"):
            use()


def test_pinned_memory_is_unregistered_before_it_is_unmapped_and_never_under_a_view(make):
    calls = []
    region = make(0)

    def register(address, length):
        calls.append(("register", length))
        return lambda: calls.append(("unregister", f"{address:x}-" in Path("/proc/self/maps").read_text()))

    region.pin(register)
    view = region.create_next_view(100)
    assert region.is_pinned
    region.cleanup()
    assert calls == [("register", 800)]
    del view
    assert calls[1:] == [("unregister", True)]
    assert not region.is_pinned


def test_thousand_attach_and_detach_cycles_leave_everything_flat(make, system):
    def state():
        gc.collect()
        return open_fds(), len(Path("/proc/self/maps").read_text().splitlines())

    def rss():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def cycle():
        region = SharedOffloadRegion("one", 256 * 1024, 32, 0, 1, 8192, system=system)
        region.create_next_view(8192)[:] = 1
        assert region.cleanup()

    for _ in range(20):
        cycle()
    before, before_rss = state(), rss()
    for _ in range(1000):
        cycle()
    after = state()
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) <= 4
    assert rss() - before_rss < 4 * MIB


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_fork_may_neither_use_the_region_nor_remove_its_name(make, system):
    region = make(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            region.create_next_view(1)
        except UsageError as error:
            code = 0 if str(os.getppid()) in str(error) else 2
        finally:
            region.cleanup()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(system) == ["kvoffload_one.mmap"]
    region.create_next_view(1)[:] = 1


# ---- unnamed regions


def test_unnamed_region_is_handed_over_a_socket_and_again_on_rejoin(system):
    parent_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with parent_end, rank_end:
        parent = SharedOffloadRegion(None, 800, 4, None, 2, 100)
        for value in (1, 2):
            parent.send(parent_end)
            rank = SharedOffloadRegion.receive(rank_end, 1)
            rank.create_next_view(100)[:] = value
            assert rank.cleanup()
            assert (parent.whole()[:, 100:] == value).all()
        assert parent.mmap_path is None
        assert parent.cleanup()
    assert names(system) == []


def test_unnamed_region_cannot_be_cut_under_a_reader():
    region = SharedOffloadRegion(None, 800, 4, 0, 2, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fileno(), 0)
    region.cleanup()


def test_unsealed_memory_of_the_right_size_is_refused():
    """Who sent it could cut it later, and every access would be a SIGBUS."""
    one, two = socket.socketpair()
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with one, two:
        os.ftruncate(fd, 800)
        header = b'{"total_size_bytes": 800, "num_blocks": 4, "num_workers": 2, "cpu_page_size": 100}'
        socket.send_fds(one, [header], [fd])
        with pytest.raises(LayoutError, match="expected a sealed region of 800 bytes, got seals"):
            SharedOffloadRegion.receive(two, 0)
    os.close(fd)


def test_rank_that_joins_changes_no_byte_on_kernels_without_populate(make, monkeypatch):
    """Before 5.14 pages are touched one by one: a rank that came back wrote zeros over blocks that were ready."""
    monkeypatch.setattr("kvoffload.memory.populate._madvise", no_populate)
    first = make(0, keep_name=True, page=4096)
    first.whole()[:] = 7
    second = make(1, keep_name=True, page=4096)
    assert (second.whole() == 7).all()


def no_populate(*_):
    ctypes.set_errno(errno.EINVAL)
    return -1


def test_joiner_whose_file_lost_its_name_meanwhile_starts_over(make, system, monkeypatch):
    """The last rank removed the name between the joiner's open and its lock: nobody else could ever find that file."""
    old = make(0)
    lock = shm_file._lock

    def unlinked_just_before(fd, kind):
        if kind == fcntl.LOCK_SH:
            old.mmap_path.unlink(missing_ok=True)
        return lock(fd, kind)

    monkeypatch.setattr(shm_file, "_lock", unlinked_just_before)
    new = make(1)
    assert new.is_creator
    new.whole()[:] = 5
    assert not old.whole().any()


def test_what_is_no_region_is_refused_and_closed():
    one, two = socket.socketpair()
    with one, two:
        fds = open_fds()
        one.send(b"hello")
        with pytest.raises(LayoutError, match="expected a region's geometry"):
            SharedOffloadRegion.receive(two, 0)
        read, write = os.pipe()
        header = b'{"total_size_bytes": 800, "num_blocks": 4, "num_workers": 2, "cpu_page_size": 100}'
        socket.send_fds(one, [header], [read])
        with pytest.raises(LayoutError, match="expected a sealed region of 800 bytes"):
            SharedOffloadRegion.receive(two, 0)
        socket.send_fds(one, [header.replace(b'"num_workers": 2', b'"num_workers": 0')], [read])
        with pytest.raises(UsageError, match="must be positive"):
            SharedOffloadRegion.receive(two, 0)
        os.close(read)
        os.close(write)
        assert open_fds() == fds
        one.close()
        with pytest.raises(ClosedError, match="closed before a region came"):
            SharedOffloadRegion.receive(two, 0)
