"""The CUDA back end: one stream per direction, batched copies by the DMA engines, no kernel and no torch.

Theory of operation. A direction has one stream, so its copies run in the order of submission. A copy first waits, on
the device, for the caller's `ready` event and for the last copy the other way that touches its GPU blocks. Then all its
pieces are queued with `cuMemcpyBatchAsync`, and an event marks its end. A thread sleeps in the oldest end event, then
takes all that are over, and rings.

Sources on the GPU are read in stream order: a kernel may still write them until `ready`. Sources in host memory may be
read at any time, because a block is readable only after the host saw its store complete.

Copies from or to memory that is not page-locked block the submitting call; then the thread submits them, one by one.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload.errors import ClosedError, TransferError, UsageError
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.pinning import PinMode, PinnedRange, pin
from kvoffload.transfer.base import HOST_VISIBLE, AllReady, Ready
from kvoffload.transfer.copy_thread import CopyThread
from kvoffload.transfer.cuda_batch import MAX_BATCH, copy_descriptors, cut_at, non_empty
from kvoffload.transfer.cuda_driver import (
    CAPTURE_ERRORS,
    NOT_READY,
    ORDER_ANY,
    ORDER_STREAM,
    SUCCESS,
    CudaDevice,
    CudaDriver,
)
from kvoffload.transfer.plan import CopyPlan, coalesce
from kvoffload.transfer.stream import CopyEvent

logger = logging.getLogger(__name__)


class CudaCopy:
    """One copy on a `CudaStream`; done when the stream's thread says so."""

    __slots__ = (
        "_done",
        "_ended",
        "_submitted",
        "after",
        "copy_seconds",
        "end",
        "error",
        "keep",
        "plan",
        "ready",
        "start",
        "waits",
    )

    def __init__(self, plan: CopyPlan, waits: Sequence[int], after: CopyEvent | None) -> None:
        self.plan: CopyPlan | None = plan
        self.waits = waits
        self.after = after
        self.error: BaseException | None = None
        self.start = self.end = 0
        self.keep: object = None
        self.ready: object = None
        self.copy_seconds = 0.0
        self._done = threading.Event()
        self._submitted = self._ended = time.monotonic()

    @property
    def queue_seconds(self) -> float:
        """From submission to the copy's start."""
        return max(0.0, self._ended - self._submitted - self.copy_seconds)

    def query(self) -> bool:
        """Return whether the copy has ended."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the copy has ended; return False at the timeout."""
        return self._done.wait(timeout)

    def finish(self, error: BaseException | None) -> None:
        """Note how the copy ended, let go of its memory, and wake those who wait."""
        self._ended = time.monotonic()
        self.error = error
        self.plan = self.keep = self.after = self.ready = None
        self._done.set()


class CudaStream(CopyThread[CudaCopy]):
    """A stream, its pool of events, and the thread that waits for its copies.

    Args:
        name: The thread's name.
        on_done: Called from the thread after copies have ended.
        device: Where the stream is.
        pinned: Host memory is page-locked: copies are asynchronous and the owner submits them.
        max_batch: Descriptors in one call.
        cuts: Host addresses that no single copy may cross, ascending: there one page-locked piece ends.
    """

    def __init__(
        self,
        name: str,
        on_done: Callable[[], None],
        device: CudaDevice,
        *,
        pinned: bool = True,
        max_batch: int = MAX_BATCH,
        cuts: Sequence[int] = (),
    ) -> None:
        super().__init__(name, on_done)
        self._device = device
        self._pinned = pinned
        self._max_batch = max_batch
        self._cuts = cuts
        self._events: list[int] = []
        self._abandoned = False
        with device.current():
            self._stream = device.new_stream()
        if not device.driver.has_batch:
            _warn_old_driver(device.driver)

    def submit(self, plan: CopyPlan, ready: Ready, after: CopyEvent | None) -> CudaCopy:
        """Queue a copy; see `CopyStream`.

        Raises:
            UsageError: `ready` is no event of this device, was never recorded, or belongs to a graph capture.
            TransferError: The driver refused the copy.
            ClosedError: The stream is closed.
        """
        with self._changed:
            self._check_open()
        copy = CudaCopy(plan, event_handles(ready, self._device), after)
        copy.ready = ready  # its event must live until the stream waits for it: later, when memory is pageable
        if self._pinned:
            with self._device.current():
                self._check_waits(copy)
                self._launch(copy)
        with self._changed:
            self._put(copy)
        return copy

    def _check_waits(self, copy: CudaCopy) -> None:
        """Refuse events of a graph capture, and drop those that have happened; the context is current."""
        open_waits = []
        for event in copy.waits:
            code = self._device.driver.query(event)
            if code in CAPTURE_ERRORS:
                raise UsageError(
                    "the ready event belongs to a CUDA graph capture: transfers cannot be captured; record an event "
                    "after the graph's launch and pass that"
                )
            if code not in {SUCCESS, NOT_READY}:
                raise UsageError(f"the ready event cannot be waited for: CUDA error {code}; was it recorded?")
            if code == NOT_READY:
                open_waits.append(event)
        copy.waits = open_waits

    def _launch(self, copy: CudaCopy) -> None:
        """Queue waits, copies and events on the stream; the context is current."""
        device, driver, stream, plan = self._device, self._device.driver, self._stream, copy.plan
        if plan is None:
            return
        copy.start, copy.end = self._take_event(), self._take_event()
        try:
            for event in copy.waits:
                driver.call("cuStreamWaitEvent", stream, event, 0)
            if isinstance(copy.after, CudaCopy) and copy.after.end and not copy.after.query():
                driver.call("cuStreamWaitEvent", stream, copy.after.end, 0)
            _refuse_capture(device, stream)
            driver.call("cuEventRecord", copy.start, stream)
            descriptors = non_empty(
                cut_at(self._cuts, coalesce(plan.descriptors()), host_is_source=not plan.gpu_to_cpu)
            )
            copy.keep = (descriptors, plan)
            order = ORDER_STREAM if plan.gpu_to_cpu else ORDER_ANY
            copy_descriptors(driver, descriptors, order, stream, self._max_batch)
            driver.call("cuEventRecord", copy.end, stream)
        except BaseException:
            self._drain_after_failure(copy)
            raise

    def _drain_after_failure(self, copy: CudaCopy) -> None:
        """A launch failed half-way: wait until what was queued has ended, so that no byte moves for a refused job."""
        driver = self._device.driver
        try:
            driver.call("cuEventRecord", copy.end, self._stream)
            driver.call("cuEventSynchronize", copy.end)
        except TransferError as error:
            logger.warning("%s: after a failed submission: %s", self._name, error)
        self._events += [copy.start, copy.end]

    def _take_event(self) -> int:
        with self._changed:
            if self._events:
                return self._events.pop()
        return self._device.new_event()

    def shutdown(self, timeout: float) -> None:
        """Close and wait for the thread; copies on the device are never cut off."""
        self.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                self._abandoned = True
                return
        self._release()

    def _release(self) -> None:
        with self._changed:
            stream, self._stream = self._stream, 0
            events, self._events = self._events, []
        if not stream:
            return
        with self._device.current() as driver:
            for event in events:
                driver.call("cuEventDestroy_v2", event)
            driver.call("cuStreamDestroy_v2", stream)

    def _run(self) -> None:
        with self._device.current():
            while (head := self._next(take=False)) is not None:
                self._await(head)
                self._take_ended()
                self._ring()

    def _await(self, copy: CudaCopy) -> None:
        """Sleep until the oldest copy has ended; submit it first when host memory is pageable."""
        try:
            if not self._pinned:
                self._launch_late(copy)
            self._device.driver.call("cuEventSynchronize", copy.end)
        except BaseException as error:  # noqa: BLE001 - a dead thread would leave every later job pending
            copy.error = error

    def _launch_late(self, copy: CudaCopy) -> None:
        """Submit a copy of pageable memory, which blocks until it is over; the stream's thread only."""
        if self._abandoned:
            raise ClosedError(f"{self._name} was shut down before this copy started")
        if copy.after is not None:
            copy.after.wait()
        self._check_waits(copy)
        self._launch(copy)

    def _take_ended(self) -> None:
        """End the oldest copy, and those behind it that are over as well."""
        device = self._device
        while True:
            with self._changed:
                copy = self._queue.popleft()
            if copy.error is None:
                try:
                    copy.copy_seconds = device.elapsed_seconds(copy.start, copy.end)
                except TransferError as error:
                    copy.error = error
            with self._changed:
                if copy.error is None:
                    self._events += [copy.start, copy.end]
                following = self._queue[0] if self._queue else None
            copy.finish(copy.error)
            if following is None or not self._pinned or device.driver.query(following.end) != SUCCESS:
                return


class CudaBackend:
    """Everything of one device: pins host memory and makes streams.

    Args:
        name: Device name as torch writes it, `"cuda"` or `"cuda:0"`.
        driver: The driver; None loads the machine's.

    Raises:
        UnsupportedError: No driver or no such device.
    """

    def __init__(self, name: str, driver: CudaDriver | None = None) -> None:
        ordinal = int(name.partition(":")[2] or 0)
        self.device = CudaDevice(driver or CudaDriver.load(), ordinal)
        self._pinned: list[PinnedRange] = []
        self.is_pinned = False

    def pin(
        self, tensors: Sequence[BlockTensor], mode: PinMode, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Page-lock the host tensors as `pin_memory` says; must come before the first stream is made.

        Raises:
            UnsupportedError: `mode` is `"require"` and the driver refused.
        """
        start = min(tensor.base_address for tensor in tensors) // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(tensor.base_address + tensor.span_bytes for tensor in tensors)
        row = max(mmap.PAGESIZE, *(tensor.row_stride_bytes for tensor in tensors))
        with self.device.current():
            pinned = pin(mode, self.device, start, end - start, row_bytes=row, progress=progress)
        if pinned is not None:
            self._pinned.append(pinned)
        self.is_pinned = pinned is not None

    def make_stream(self, name: str, on_done: Callable[[], None]) -> CudaStream:
        """Return the stream of one direction; see `MakeStream`."""
        cuts = sorted(cut for pinned in self._pinned for cut in pinned.cuts)
        return CudaStream(name, on_done, self.device, pinned=self.is_pinned, cuts=cuts)

    def close(self) -> None:
        """Unregister host memory and give the context back; only when no copy runs. Idempotent."""
        with self.device.current():
            while self._pinned:
                self._pinned.pop().close()
        self.device.close()


def _refuse_capture(device: CudaDevice, stream: int) -> None:
    if device.capturing(stream):
        raise UsageError("a CUDA graph capture is going on: transfers cannot be captured")


def event_handles(ready: Ready, device: CudaDevice) -> list[int]:
    """Return the driver events that a copy must wait for.

    Raises:
        UsageError: Something that is no recorded CUDA event of this device.
    """
    if isinstance(ready, AllReady):
        return [handle for event in ready.events for handle in event_handles(event, device)]
    if isinstance(ready, str) and ready == HOST_VISIBLE:
        return []
    event: Any = ready
    handle = getattr(event, "cuda_event", None)
    if handle is None:
        raise UsageError(f'ready={ready!r}: on CUDA it is "host-visible" or a recorded torch.cuda.Event')
    if not handle:
        raise UsageError("the ready event was never recorded: record it after the last write of the blocks")
    index = getattr(getattr(event, "device", None), "index", device.ordinal)
    if index is not None and index != device.ordinal:
        raise UsageError(f"the ready event is of device {index}, the KV caches are on device {device.ordinal}")
    return [int(handle)]


_warned_versions: set[int] = set()


def _warn_old_driver(driver: CudaDriver) -> None:
    if driver.version not in _warned_versions:
        _warned_versions.add(driver.version)
        logger.warning(
            "the CUDA driver (%d) has no batched copies: blocks are copied one by one, slower; 12.8 or newer has them",
            driver.version,
        )
