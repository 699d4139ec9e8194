"""The part of the CUDA driver API that moving blocks needs, through ctypes: no C++ of our own, no CUDA package.

Functions are called through prototypes that drop the GIL. `cuMemcpyBatchAsync` is resolved with `cuGetProcAddress` for
version 12.8, which gives the same 9-argument function on every driver since; the symbol that a library exports changes
its arguments between releases. Every wrapper raises `TransferError` with the driver's name of the error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import TransferError, UnsupportedError

SUCCESS, NOT_READY = 0, 600
CAPTURE_ERRORS = {900, 901, 902, 903, 904, 905, 906, 907, 908}
BATCH_VERSION = 12080

_EVENT_BLOCKING_SYNC = 1
_STREAM_NON_BLOCKING = 1
_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2

ORDER_STREAM = 1
"""The source is read in stream order."""
ORDER_ANY = 3
"""The source may be read at any time: it is complete and stays so until the copy has ended."""


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: 24 bytes; locations stay invalid (0), which lets the driver find out."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_location", c_int * 2),
        ("dst_location", c_int * 2),
        ("flags", c_uint),
    )


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}
_BATCH = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_size_t), c_void_p
)


class CudaDriver:
    """The driver library, initialised.

    Args:
        library: `libcuda.so.1` as ctypes loads it, or a stand-in with the same functions.

    Attributes:
        version: Driver API version, such as 12080.
        has_batch: `cuMemcpyBatchAsync` is there.

    Raises:
        UnsupportedError: The library lacks a function, or finds no usable device.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a ctypes library
        self._functions: dict[str, Any] = {}
        for name, arguments in _PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise UnsupportedError(f"the CUDA driver library lacks {name}: update the driver") from None
            function.argtypes, function.restype = list(arguments), c_int
            self._functions[name] = function
        code = self._functions["cuInit"](0)
        if code != SUCCESS:
            raise UnsupportedError(f"the CUDA driver cannot start: {self._name(code)}")
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.version = version.value
        self._batch = self._resolve_batch(library)
        self.has_batch = self._batch is not None

    @classmethod
    def load(cls) -> CudaDriver:
        """Load the machine's driver.

        Raises:
            UnsupportedError: There is none.
        """
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(f"no CUDA driver on this machine: {error}; install NVIDIA's") from None
        return cls(library)

    def _resolve_batch(self, library: Any) -> Any | None:  # noqa: ANN401 - ctypes
        """Return the 9-argument `cuMemcpyBatchAsync`, or None on drivers before 12.8."""
        lookup = getattr(library, "cuGetProcAddress_v2", None)
        if lookup is None or self.version < BATCH_VERSION:
            return None
        lookup.argtypes = [c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)]
        lookup.restype = c_int
        address, status = c_void_p(), c_int()
        code = lookup(b"cuMemcpyBatchAsync", byref(address), BATCH_VERSION, 0, byref(status))
        return _BATCH(address.value) if code == SUCCESS and address.value else None

    def _name(self, code: int) -> str:
        text = c_char_p()
        known = self._functions["cuGetErrorName"](code, byref(text)) == SUCCESS and text.value
        return f"{text.value.decode()} ({code})" if known and text.value else f"CUDA error {code}"

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes values
        """Call a driver function.

        Raises:
            TransferError: It failed; the message holds the function and the error's name.
        """
        code = self._functions[name](*arguments)
        if code != SUCCESS:
            error = TransferError(f"{name} failed: {self._name(code)}")
            error.cuda_error = code
            raise error

    def query(self, event: int) -> int:
        """Return the state of an event as a driver code: `SUCCESS`, `NOT_READY`, or an error."""
        code: int = self._functions["cuEventQuery"](event)
        return code

    def copy_batch(
        self,
        dst: npt.NDArray[np.int64],
        src: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        order: int,
        stream: int,
    ) -> None:
        """Queue copies of `sizes[i]` bytes from `src[i]` to `dst[i]`; unordered among each other.

        Args:
            dst: Destination addresses, int64, C-contiguous.
            src: Source addresses.
            sizes: Bytes, none of them 0.
            order: `ORDER_STREAM` or `ORDER_ANY`.
            stream: Not the legacy default stream.

        Raises:
            TransferError: The driver refused; the message names the descriptor when it knows it.
        """
        attributes, index, failed = MemcpyAttributes(src_access_order=order), c_size_t(0), c_size_t(2**64 - 1)
        batch: Any = self._batch
        code = batch(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(index), 1, byref(failed), stream,
        )  # fmt: skip
        if code != SUCCESS:
            where = f" at descriptor {failed.value}" if failed.value < len(sizes) else ""
            raise TransferError(f"cuMemcpyBatchAsync of {len(sizes)} copies failed{where}: {self._name(code)}")

    def copy(self, dst: int, src: int, size: int, stream: int) -> None:
        """Queue one copy."""
        self.call("cuMemcpyAsync", dst, src, size, stream)


class CudaDevice:
    """One device's primary context, which the engine's framework uses as well.

    Args:
        driver: The driver.
        ordinal: Device number.

    Raises:
        UnsupportedError: There is no such device.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        count, handle, context = c_int(), c_int(), c_void_p()
        driver.call("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            raise UnsupportedError(f"there is no CUDA device {ordinal}: this machine has {count.value}")
        driver.call("cuDeviceGet", byref(handle), ordinal)
        driver.call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self.driver = driver
        self.ordinal = ordinal
        self._handle = handle
        self._context = context
        self._closed = False

    def close(self) -> None:
        """Give the primary context back; idempotent."""
        if not self._closed:
            self._closed = True
            self.driver.call("cuDevicePrimaryCtxRelease_v2", self._handle)

    @contextmanager
    def current(self) -> Iterator[CudaDriver]:
        """Make this device's context current in the calling thread, and restore what was current before.

        Inside, the thread's capture mode is relaxed: in the usual mode, asking an event while any other thread captures
        a CUDA graph fails, and spoils that capture.
        """
        mode = c_int(_CAPTURE_RELAXED)
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            self.driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield self.driver
            finally:
                self.driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            popped = c_void_p()
            self.driver.call("cuCtxPopCurrent_v2", byref(popped))

    def new_stream(self) -> int:
        """Return a new stream that does not synchronise with the default one; the context must be current."""
        stream = c_void_p()
        self.driver.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        return int(stream.value or 0)

    def new_event(self) -> int:
        """Return a new timed event whose synchronize sleeps instead of spinning; the context must be current."""
        event = c_void_p()
        self.driver.call("cuEventCreate", byref(event), _EVENT_BLOCKING_SYNC)
        return int(event.value or 0)

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Return the time between two recorded events that have happened."""
        milliseconds = c_float()
        self.driver.call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value * 1e-3

    def capturing(self, stream: int) -> bool:
        """Return whether a stream is part of a graph capture."""
        status = c_int()
        self.driver.call("cuStreamIsCapturing", stream, byref(status))
        return status.value != 0

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory for all contexts."""
        self.driver.call("cuMemHostRegister_v2", address, size, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self.driver.call("cuMemHostUnregister", address)
