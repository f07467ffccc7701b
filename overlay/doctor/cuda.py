"""GPU, NVRTC and CUDA libraries: those that are really loaded, not those that are installed."""

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from overlay.doctor.checks import Outcome, Surroundings, failed, passed, warned
from overlay.errors import OverlayError
from overlay.kernel.variants import SHARED_LIMIT

OURS = (120, 121)
BUILD_ID = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"  # ELF note: name of 4 bytes, 20 bytes of content, type 3
_NVRTC_FIX = "pip install 'nvidia-cuda-nvrtc>=13', or run where torch's CUDA 13 libraries are installed"


def gpu(around: Surroundings) -> Outcome:
    """Capability of the visible GPUs, and the shared memory that a block of theirs may use."""
    devices = around.hardware.devices
    if not devices:
        return warned("no GPU is visible to NVML", "nothing to do where no engine is to run; else install the driver")
    names = ", ".join(sorted({f"{d.name} (sm_{d.capability[0]}{d.capability[1]})" for d in devices}))
    text = f"{len(devices)} x {names}"
    if len({device.capability for device in devices}) > 1:
        return warned(
            f"{text}: different capabilities; patches for one of them are armed and ask for the GPU in use each time",
            "CUDA_VISIBLE_DEVICES with the GPUs that are to serve; an engine needs equal ones",
        )
    if around.hardware.lacks(12):
        return warned(f"{text}: not sm_120 or sm_121, the patches for those stand down", "nothing to do")
    driver = around.loaded.get("driver", around.loaded)
    if "error" in driver:
        return warned(f"{text}; the CUDA driver does not answer: {driver['error']}", "look at `nvidia-smi` and dmesg")
    shared = min(device["shared_bytes"] for device in driver["devices"])
    if shared < SHARED_LIMIT:
        return failed(
            f"{text}: a block may use {shared} bytes of shared memory, the kernel needs {SHARED_LIMIT}",
            "sparse_mla=false",
        )
    return passed(f"{text}, {shared} bytes of shared memory a block, driver for CUDA {_cuda_version(driver['cuda'])}")


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def nvrtc(around: Surroundings) -> Outcome:
    """The NVRTC that CuPy loads, and whether it can compile for this GPU: 12.8 knows sm_120 alone, 12.9 sm_121 too."""
    found = around.loaded.get("nvrtc", around.loaded)
    if "error" in found:
        missing = failed if _kernel_is_wanted(around) else warned
        return missing(f"CuPy cannot load NVRTC: {found['error']}", _NVRTC_FIX)
    version = ".".join(map(str, found["version"]))
    text = f"NVRTC {version} from {', '.join(found['files']) or 'an unknown file'}"
    here = {major * 10 + minor for major, minor in (device.capability for device in around.hardware.devices)}
    wanted = sorted(here & set(OURS)) or list(OURS)
    missing = [f"sm_{arch}" for arch in wanted if arch not in found["architectures"]]
    if not missing:
        return passed(f"{text} knows {' and '.join(f'sm_{arch}' for arch in wanted)}")
    verdict = f"{text} does not know {' and '.join(missing)}"
    return (failed if here & set(OURS) and _kernel_is_wanted(around) else warned)(verdict, _NVRTC_FIX)


def _kernel_is_wanted(around: Surroundings) -> bool:
    """Would a patch that compiles a kernel be applied here? Taken for granted where nobody can tell."""
    try:
        return any(entry.on and "cupy" in entry.patch.requires for entry in around.entries)
    except (OverlayError, LookupError):
        return True


def libraries(around: Surroundings) -> Outcome:
    """CUDA libraries that torch and CuPy loaded: from the environment's wheels, or from somewhere else, or twice."""
    loaded = around.loaded.get("libraries", around.loaded)
    if "error" in loaded:
        return warned(f"the loaded libraries are not known: {loaded['error']}", "see the check `nvrtc`")
    torch = around.loaded.get("torch", {})
    if "error" in torch:
        return failed(f"torch cannot be imported: {torch['error']}", "reinstall torch as vLLM's metadata requires it")
    if not loaded:
        return passed("torch loaded no CUDA library")
    wheels = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    # The driver's own library belongs to the machine.
    own = [file for file in loaded if not re.search(r"/libcuda\.so", file)]
    outside = [file for file in own if not any(os.path.realpath(file).startswith(f"{folder}/") for folder in wheels)]
    twice = [name for name, files in _by_name(own).items() if len(files) > 1]
    if twice:
        files = [file for name in twice for file in _by_name(own)[name]]
        return warned(f"loaded twice: {', '.join(files)}", "take the second copy off LD_LIBRARY_PATH and LD_PRELOAD")
    if outside and len(outside) < len(own):
        return warned(
            f"loaded from outside this environment: {', '.join(outside)}",
            "unset LD_LIBRARY_PATH and LD_PRELOAD, unless this was meant",
        )
    return passed(f"{len(own)} CUDA libraries, all from {'the system' if outside else 'this environment'}")


def _by_name(files: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in files:
        found.setdefault(os.path.basename(file).partition(".so")[0], []).append(file)
    return found


def nccl(around: Surroundings) -> Outcome:
    """Every NCCL on this machine by its build. Two builds may report the same version and behave differently."""
    loaded = around.loaded.get("libraries", ())
    files = {os.path.realpath(file) for file in loaded if "/libnccl.so" in file} if "error" not in loaded else set()
    chosen = os.environ.get("VLLM_NCCL_SO_PATH")
    files |= {os.path.realpath(file) for file in [*([chosen] if chosen else []), *_system("libnccl.so.2")]}
    builds: dict[str, list[str]] = {}
    for file in sorted(files):
        if os.path.isfile(file):
            builds.setdefault(build(Path(file)), []).append(file)
    if not builds:
        return passed("no NCCL on this machine")
    text = "; ".join(f"build {name}: {', '.join(where)}" for name, where in builds.items())
    if len(builds) > 1:
        return warned(
            f"{len(builds)} builds of NCCL: {text}",
            "all nodes of one engine need the same build: compare these lines between them, and set VLLM_NCCL_SO_PATH",
        )
    return passed(text)


def _system(name: str) -> list[str]:
    """Where the dynamic loader's cache and LD_LIBRARY_PATH have a library."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    found = [os.path.join(folder, name) for folder in folders]
    try:
        done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return found + re.findall(rf"{re.escape(name)} .*=> (\S+)", done.stdout)


def build(file: Path) -> str:
    """First digits of a shared library's build id; its size where it has none."""
    with file.open("rb") as stream:
        head = stream.read(1 << 20)
    where = head.find(BUILD_ID)
    if where < 0:
        return f"of {file.stat().st_size} bytes"
    return head[where + len(BUILD_ID) :][:20].hex()[:12]
