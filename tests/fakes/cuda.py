"""A CUDA driver library in Python: real ctypes entry points, streams with threads, "device" memory on the host.

Every call is recorded in `calls` as `(name, arguments)`. Copies really happen, in stream order, so the handler contract
can be checked byte by byte. What a real driver refuses is refused here with the same code.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from kvoffload.transfer.cuda_driver import MemcpyAttributes

INVALID_VALUE, INVALID_HANDLE, NOT_READY, CAPTURED_EVENT, OUT_OF_MEMORY = 1, 400, 600, 907, 2
CAPTURE_UNSUPPORTED = 900
_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class _Stream:
    """A queue of operations and the thread that runs them."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.queue: deque = deque()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="fake-cuda-stream", daemon=True)
        self.thread.start()

    def put(self, operation) -> None:
        with self.fake.changed:
            self.queue.append(operation)
            self.fake.changed.notify_all()

    def _run(self) -> None:
        changed = self.fake.changed
        while True:
            with changed:
                while not self.queue:
                    if self.closed:
                        return
                    changed.wait()
                operation = self.queue.popleft()
            operation()


class _Event:
    """Counts how often it was recorded and how often that was reached."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0
        self.captured = False


class ComputeEvent:
    """What a caller records after its last write; looks like a `torch.cuda.Event`."""

    class _Device:
        def __init__(self, index: int) -> None:
            self.index = index

    def __init__(self, fake: FakeCuda, device: int = 0, *, recorded: bool = True, captured: bool = False) -> None:
        self._fake = fake
        self.cuda_event = fake.add_event(recorded=recorded, captured=captured) if recorded else 0
        self.device = self._Device(device)

    def wait(self, stream=None) -> None:
        """As torch's: makes a stream wait, not the host."""

    def set(self) -> None:
        """The work before it has ended."""
        self._fake.reach(self.cuda_event)


class FakeCuda:
    """Stand-in for `libcuda.so.1`.

    Args:
        version: Driver API version.
        devices: Number of devices.
    """

    def __init__(self, version: int = 13000, devices: int = 1) -> None:
        self.version = version
        self.changed = threading.Condition(threading.RLock())
        self.calls: list[tuple[str, tuple]] = []
        self.registered: dict[int, int] = {}
        self.streams: dict[int, _Stream] = {}
        self.events: dict[int, _Event] = {}
        self.contexts: dict[int, list[int]] = {}
        self.capturing = False
        self.captured_elsewhere = False
        self.modes: dict[int, int] = {}
        self._handles = itertools.count(0x1000, 16)
        self._failures: dict[str, deque[int]] = {}
        self._devices = devices
        self._keep: list = []
        for name, arguments in _SIGNATURES.items():
            setattr(self, name, self._export(name, arguments))
        self._batch = self._export("cuMemcpyBatchAsync", _BATCH_ARGUMENTS)
        if version < 12000:
            del self.cuGetProcAddress_v2

    # ---- for tests

    def fail_next(self, name: str, code: int, times: int = 1) -> None:
        """Let the next calls of a function fail."""
        self._failures.setdefault(name, deque()).extend([code] * times)

    def named(self, *names: str) -> list[tuple[str, tuple]]:
        """The recorded calls of some functions, in order."""
        return [call for call in self.calls if call[0] in names]

    def add_event(self, *, recorded: bool, captured: bool = False) -> int:
        with self.changed:
            handle = next(self._handles)
            event = self.events[handle] = _Event()
            event.recorded, event.captured = int(recorded), captured
            return handle

    def reach(self, handle: int) -> None:
        with self.changed:
            event = self.events[handle]
            event.reached = event.recorded
            self.changed.notify_all()

    def close(self) -> None:
        """End every stream's thread; call it after every event was reached."""
        with self.changed:
            for event in self.events.values():
                event.reached = event.recorded
            for stream in self.streams.values():
                stream.closed = True
            self.changed.notify_all()
        for stream in self.streams.values():
            stream.thread.join(5)

    # ---- the library

    def _export(self, name: str, arguments: tuple):
        implementation = getattr(self, "_" + name, None)

        def entry(*values) -> int:
            with self.changed:
                self.calls.append((name, values))
                failures = self._failures.get(name)
                if failures:
                    return failures.popleft()
            return (implementation(*values) if implementation is not None else 0) or 0

        function = ctypes.CFUNCTYPE(c_int, *arguments)(entry)
        self._keep.append(function)
        return function

    def _cuDriverGetVersion(self, out):
        out[0] = self.version

    def _cuGetErrorName(self, code, out):
        out[0] = _NAMES.get(code, b"CUDA_ERROR_UNKNOWN")

    def _cuDeviceGetCount(self, out):
        out[0] = self._devices

    def _cuDeviceGet(self, out, ordinal):
        out[0] = ordinal

    def _cuDevicePrimaryCtxRetain(self, out, device):
        out[0] = 0x7000 + device

    def _cuCtxPushCurrent_v2(self, context):
        self.contexts.setdefault(threading.get_ident(), []).append(context)

    def _cuCtxPopCurrent_v2(self, out):
        out[0] = self.contexts[threading.get_ident()].pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        thread = threading.get_ident()
        mode[0], self.modes[thread] = self.modes.get(thread, 0), mode[0]

    def _unsafe(self) -> bool:
        """Another thread captures a graph in global mode, and this thread is not relaxed: the capture is spoilt."""
        return self.captured_elsewhere and self.modes.get(threading.get_ident(), 0) == 0

    def _current(self) -> bool:
        return bool(self.contexts.get(threading.get_ident()))

    def _cuStreamCreate(self, out, flags):
        if not self._current() or flags != 1:
            return 201
        with self.changed:
            out[0] = handle = next(self._handles)
            self.streams[handle] = _Stream(self)
        return 0

    def _cuStreamDestroy_v2(self, stream):
        with self.changed:
            self.streams[stream].closed = True
            self.changed.notify_all()

    def _cuStreamIsCapturing(self, stream, out):
        out[0] = int(self.capturing)

    def _cuEventCreate(self, out, flags):
        if not self._current():
            return 201
        out[0] = self.add_event(recorded=False)
        return 0

    def _cuEventDestroy_v2(self, event):
        del self.events[event]

    def _cuEventRecord(self, event, stream):
        with self.changed:
            state = self.events[event]
            state.recorded += 1
            number = state.recorded

        def reach():
            with self.changed:
                state.reached = max(state.reached, number)
                self.changed.notify_all()

        self.streams[stream].put(reach)

    def _cuStreamWaitEvent(self, stream, event, flags):
        with self.changed:
            state = self.events[event]
            number = state.recorded
        self.streams[stream].put(lambda: self._await(state, number))

    def _await(self, state: _Event, number: int) -> None:
        with self.changed:
            while state.reached < number:
                self.changed.wait()

    def _cuEventQuery(self, event):
        if self._unsafe():
            return CAPTURE_UNSUPPORTED
        with self.changed:
            state = self.events.get(event)
            if state is None:
                return INVALID_HANDLE
            if state.captured:
                return CAPTURED_EVENT
            return 0 if state.reached >= state.recorded else NOT_READY

    def _cuEventSynchronize(self, event):
        if self._unsafe():
            return CAPTURE_UNSUPPORTED
        if not self._current():
            return 201
        with self.changed:
            state = self.events[event]
            number = state.recorded
        self._await(state, number)
        return 0

    def _cuEventElapsedTime(self, out, start, end):
        out[0] = 0.25

    def _cuMemcpyAsync(self, dst, src, size, stream):
        if not size or not dst or not src:
            return INVALID_VALUE
        self.streams[stream].put(lambda: ctypes.memmove(dst, src, size))
        return 0

    def _cuMemHostRegister_v2(self, address, size, flags):
        self.registered[address] = size

    def _crosses_registrations(self, dst, src, size):
        """A copy begins in registered memory and goes on behind the end of that registration."""
        return any(
            start <= address < start + length < address + size
            for address in (dst, src)
            for start, length in self.registered.items()
        )

    def _cuMemHostUnregister(self, address):
        del self.registered[address]

    def _cuGetProcAddress_v2(self, symbol, out, version, flags, status):
        if symbol != b"cuMemcpyBatchAsync" or version != 12080:
            return INVALID_VALUE
        out[0] = ctypes.cast(self._batch, c_void_p).value
        return 0

    def _cuMemcpyBatchAsync(self, dsts, srcs, sizes, count, attributes, indices, num_attributes, failed, stream):
        if stream not in self.streams:  # the legacy default stream is refused, too
            return INVALID_HANDLE
        attribute = MemcpyAttributes.from_address(attributes)
        self.calls.append(("order", (attribute.src_access_order, num_attributes, c_size_t.from_address(indices).value)))
        self.calls.append(("batch", (count, stream)))
        rows = [(c_uint64 * count).from_address(array)[:] for array in (dsts, srcs, sizes)]
        for position, row in enumerate(zip(*rows, strict=True)):
            if not all(row) or self._crosses_registrations(*row):
                failed[0] = position
                return INVALID_VALUE
        self.streams[stream].put(lambda: [ctypes.memmove(*row) for row in zip(*rows, strict=True)])
        return 0


def _p(kind):
    return ctypes.POINTER(kind)


_SIGNATURES = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_p(c_int),),
    "cuGetErrorName": (c_int, _p(c_char_p)),
    "cuDeviceGet": (_p(c_int), c_int),
    "cuDeviceGetCount": (_p(c_int),),
    "cuDevicePrimaryCtxRetain": (_p(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_p(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (_p(c_int),),
    "cuStreamCreate": (_p(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, _p(c_int)),
    "cuEventCreate": (_p(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (_p(c_float), c_void_p, c_void_p),
    "cuMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuGetProcAddress_v2": (c_char_p, _p(c_void_p), c_int, c_uint64, _p(c_int)),
}
_BATCH_ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, _p(c_size_t), c_void_p)
