"""The GPUs of this process, asked of NVML through ctypes: neither CUDA nor vLLM's platform is initialised.

vLLM starts its workers by fork while CUDA is untouched, so nothing that runs at `import vllm` may touch it.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cached_property

_NVML = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED = 0, 3


@dataclass(frozen=True)
class Device:
    """One GPU: marketing name, compute capability, whether it shares the host's memory (GB10), and bytes of its own."""

    name: str
    capability: tuple[int, int]
    integrated: bool
    memory: int | None = None  # None where NVML keeps no account


class Hardware:
    """The visible GPUs, read once and only when somebody asks."""

    @classmethod
    def none(cls) -> "Hardware":
        """A machine without a GPU, as a front end may be."""
        machine = cls()
        machine.devices = ()
        return machine

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return _read_devices()

    @property
    def capability(self) -> tuple[int, int] | None:
        """Capability of the first visible GPU, the one that `name` names; None without a driver."""
        return self.devices[0].capability if self.devices else None

    @property
    def name(self) -> str | None:
        return self.devices[0].name if self.devices else None

    @property
    def integrated(self) -> bool:
        return any(device.integrated for device in self.devices)

    @property
    def architecture(self) -> str:
        """`sm_121`, `sm_120 + sm_86` on a mixed machine, or `no GPU`."""
        return " + ".join(dict.fromkeys("sm_{}{}".format(*d.capability) for d in self.devices)) or "no GPU"

    def lacks(self, major: int) -> bool:
        """There are GPUs, and none is of the family `major`.x: only then may a patch for that family stand down.

        A process cannot tell at `import vllm` which of the visible GPUs it will compute on (vLLM gives its workers the
        whole list and a rank). On a mixed machine every patch for a family that is there is therefore armed, and what
        it changes asks vLLM's platform for the GPU in use, each time. False without a driver: a front end without a
        GPU decides for workers that have one.
        """
        return bool(self.devices) and all(device.capability[0] != major for device in self.devices)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _read_devices() -> tuple[Device, ...]:
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != _SUCCESS:
        return ()
    try:
        return tuple(_describe(nvml, handle) for handle in _visible_handles(nvml))
    finally:
        nvml.nvmlShutdown()


def _visible_handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Handles in the order of CUDA_VISIBLE_DEVICES (indices or `GPU-` UUIDs); like CUDA, stops at the first bad one.

    An empty variable counts as unset, as in vLLM's platform: Ray gives it to a process in a placement group without
    GPUs, which decides for workers that have some.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return []
    names = [str(i) for i in range(count.value)] if not wanted else [n.strip() for n in wanted.split(",")]
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdigit():
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            found = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if found != _SUCCESS:
            break
        handles.append(handle)
    return handles


def _describe(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Device:
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(handle, name, 96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    # NVML keeps no memory account of its own where the GPU uses the host's memory: that is how GB10 shows itself.
    memory = _Memory()
    found = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    total = memory.total if found == _SUCCESS else None
    return Device(name.value.decode(), (major.value, minor.value), found == _NOT_SUPPORTED, total)
