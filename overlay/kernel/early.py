"""Early starts: a kernel whose blocks take their places while the kernel before it in the stream still runs.

Programmatic dependent launch, from compute capability 9.0 on. The kernel itself waits for what it reads
(`wait_for_prerequisites` in cuda/ptx.cuh), so it may be launched either way. CuPy's launch has no such attribute;
NVIDIA's own bindings, which torch brings, have.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from overlay.kernel.errors import KernelError

CAPABILITY = (9, 0)  # the first that can
CTYPES = {
    int: ctypes.c_int64,
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.float32: ctypes.c_float,
}  # as CuPy passes them


def starting_early(function: Any, device: torch.device) -> Any:
    """A `cupy.cuda.Function`, launched early where the device can and the bindings are there; else as it is."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return function
    try:
        from cuda.bindings import driver
    except ImportError:  # older torch does not bring them: a microsecond a call, nothing else
        return function
    return EarlyFunction(function, driver)


class EarlyStartRefused(KernelError):
    """The driver does not launch a kernel early; or it tells an error of an earlier kernel, as any launch may."""


class EarlyFunction:
    """Called like the `cupy.cuda.Function` that it launches."""

    def __init__(self, function: Any, driver: Any) -> None:
        self.function = function
        self._driver = driver
        self._attribute = driver.CUlaunchAttribute()
        self._attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute.value.programmaticStreamSerializationAllowed = 1

    def __call__(self, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0, *, stream: Any) -> None:
        """Launch on a CuPy stream. Raises EarlyStartRefused with the driver's own name for what is wrong."""
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes, config.hStream = shared_mem, stream.ptr
        config.attrs, config.numAttrs = [self._attribute], 1
        values = tuple(value.item() if isinstance(value, np.generic) else value for value in args)
        types = tuple(CTYPES[type(value)] for value in args)
        (error,) = self._driver.cuLaunchKernelEx(config, self.function.ptr, (values, types), 0)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise EarlyStartRefused(f"a kernel cannot be launched early: {error.name}")
