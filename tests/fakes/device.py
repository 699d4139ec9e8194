"""A real CUDA device under the handler contract: managed memory that numpy can read, events that a test can hold back.

Used where `KVOFFLOAD_TEST_GPU=1` (see tests/gpu/run.sh): the contract suite then runs over the silicon as well.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np

from kvoffload.transfer.cuda import CudaBackend

_ATTACH_GLOBAL = 1
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Device:
    """Device 0, with a few driver functions that only tests need."""

    def __init__(self) -> None:
        self.backend = CudaBackend("cuda:0")
        self._library = ctypes.CDLL("libcuda.so.1")
        self._keep: list[object] = []

    def array(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of `values` in memory that host and device share."""
        pointer = ctypes.c_uint64()
        with self.backend.device.current():
            code = self._library.cuMemAllocManaged(
                ctypes.byref(pointer), ctypes.c_size_t(values.nbytes), ctypes.c_uint(_ATTACH_GLOBAL)
            )
        assert code == 0, f"cuMemAllocManaged: {code}"
        buffer = (ctypes.c_int8 * values.nbytes).from_address(pointer.value)
        shared = np.frombuffer(buffer, values.dtype).reshape(values.shape)
        shared[:] = values
        return shared

    def event(self) -> SimpleNamespace:
        """Return a recorded event that happens once its `set()` was called."""
        gate = threading.Event()
        wait = _HOST_FUNCTION(lambda _: gate.wait(30) and None)
        device = self.backend.device
        with device.current() as driver:
            stream, event = device.new_stream(), device.new_event()
            code = self._library.cuLaunchHostFunc(ctypes.c_void_p(stream), wait, None)
            assert code == 0, f"cuLaunchHostFunc: {code}"
            driver.call("cuEventRecord", event, stream)
        self._keep += [wait, gate]
        return SimpleNamespace(cuda_event=event, device=SimpleNamespace(index=0), set=gate.set, wait=lambda: None)
