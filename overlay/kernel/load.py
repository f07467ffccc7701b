"""From a program to a function on a device: cache or compiler, then the driver, through CuPy."""

import os
from functools import cache
from typing import Any

import torch

from overlay.kernel.build import Program, build, nvrtc_version
from overlay.kernel.cache import obtain
from overlay.kernel.errors import KernelError
from overlay.packages import CUPY

_open_files: list[int] = []


def cuda_device(device: torch.device) -> torch.device:
    """The device with its index, checked: an NVIDIA GPU that this kernel can run on."""
    if device.type != "cuda":
        raise KernelError(f"the sparse-MLA kernel runs on NVIDIA GPUs, not on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise KernelError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            "the sparse-MLA kernel needs 8.0 or newer (bf16 MMA and cp.async)"
        )
    return device


def load_function(device: torch.device, program: Program) -> Any:
    """A `cupy.cuda.Function` of the program on a device of `cuda_device`, its dynamic shared memory allowed.

    Raises:
        CompileError: NVRTC is missing or refuses.
        KernelError: the GPU lacks the shared memory, or the driver refuses the binary.
    """
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}"
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if program.dynamic_shared_bytes > available:
        raise KernelError(
            f"{program.name} needs {program.dynamic_shared_bytes} bytes of shared memory a block; "
            f"{torch.cuda.get_device_name(device)} has {available}"
        )
    binary = obtain(program, arch, nvrtc_version(), build)
    cupy = _cupy()
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        torch.cuda.current_stream(device)  # the driver needs torch's context, and the same one
        try:
            raw = cupy.RawModule(path=_as_file(program.name, binary.cubin)).get_function(program.name)
            # The function itself, not the RawKernel around it: that one asks the runtime for its current device at
            # every launch, and CuPy's runtime is not torch's.
            function = raw.kernel
            if program.dynamic_shared_bytes:
                allow_shared(function, program.dynamic_shared_bytes)
            return function
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelError(f"the driver does not load {program.name} for {arch}: {error}") from None


def allow_shared(function: Any, size: int) -> None:
    """Let a function be launched with `size` bytes of dynamic shared memory; the driver allows 48 KiB unasked."""
    driver = _cupy().cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)


def _as_file(name: str, cubin: bytes) -> str:
    """A path with exactly these bytes, which cannot change between check and load and needs no room on a disk.

    It stays open for good: CuPy remembers modules by their path.
    """
    descriptor = os.memfd_create(f"{name}.cubin", os.MFD_CLOEXEC)
    _open_files.append(descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(cubin)
    return f"/proc/self/fd/{descriptor}"


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(f"CuPy cannot be imported ({error}): {CUPY.pip}") from None
    return cupy


class _TorchStream:
    """A stream pointer under the protocol that CuPy asks of foreign streams."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@cache
def cupy_stream(pointer: int) -> Any:
    """torch's stream for CuPy, which launches on a current stream of its own."""
    return _cupy().cuda.Stream.from_external(_TorchStream(pointer))
