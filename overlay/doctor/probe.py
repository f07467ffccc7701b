"""Loads what an engine loads (CuPy's NVRTC, torch's CUDA libraries, the driver) and says what came; runs as a child.

A library that crashes while it is loaded takes this process with it, and not the doctor.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 180  # seconds: importing torch from a cold network disk takes minutes
LIBRARIES = re.compile(
    r"/lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|nvJitLink|cusparse|cusolver|nvshmem_host)\.so"
)
# CUdevice_attribute: shared memory a block may ask for, and whether the GPU shares the host's memory.
SHARED_PER_BLOCK_OPTIN, INTEGRATED = 97, 18
_TAIL = 300


def ask() -> dict[str, object]:
    """Run the probe in a child; `{"error": ...}` where it gave no answer."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from overlay.doctor import probe; probe.main()"
    environment = {**os.environ, "OVERLAY_DISABLE": "1"}
    line = [sys.executable, "-c", start]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"the probe ended with status {done.returncode}: {done.stderr.strip()[-_TAIL:]}"}


def main() -> None:
    from overlay import carried

    carried.extend_path()
    parts: dict[str, Callable[[], object]] = {"nvrtc": nvrtc, "driver": driver, "torch": torch}
    answer = {name: _value(part) for name, part in parts.items()}
    answer["libraries"] = _value(mapped)
    print(json.dumps(answer))


def _value(part: Callable[[], object]) -> object:
    try:
        return part()
    except Exception as problem:
        return {"error": f"{type(problem).__name__}: {str(problem).strip()[:_TAIL]}"}


def nvrtc() -> dict[str, object]:
    """Version and architectures of the NVRTC that CuPy loads, and its file."""
    from cupy_backends.cuda.libs import nvrtc as library

    version = library.getVersion()
    files = [file for file in mapped() if "/libnvrtc.so" in file]
    return {"version": list(version), "architectures": sorted(library.getSupportedArchs()), "files": files}


def driver() -> dict[str, object]:
    """What the driver says of each GPU, without creating a context. Raises OSError or RuntimeError."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _call(cuda.cuInit(0), "cuInit")
    version, count = ctypes.c_int(), ctypes.c_int()
    _call(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    _call(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return {"cuda": version.value, "devices": [_device(cuda, index) for index in range(count.value)]}


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, int]:
    device = ctypes.c_int()
    _call(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    found = {}
    for name, attribute in (("shared_bytes", SHARED_PER_BLOCK_OPTIN), ("integrated", INTEGRATED)):
        value = ctypes.c_int()
        _call(cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
        found[name] = value.value
    return found


def _call(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} returned {status}")


def torch() -> dict[str, object]:
    import torch as library

    return {"version": library.__version__, "cuda": library.version.cuda}


def mapped() -> list[str]:
    """Files of CUDA libraries in this process, in the order of their names."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if LIBRARIES.search(file))
