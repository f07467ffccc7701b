"""Compilation by NVRTC, through CuPy's bindings: a cubin for a named architecture, with neither GPU nor driver."""

import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from overlay.kernel import source
from overlay.kernel.errors import CompileError
from overlay.kernel.variants import MERGE_WARP_BYTES, MERGE_WARPS, Variant
from overlay.packages import CUPY

# -ftz as CuPy's own compiler adds it; -v makes ptxas report registers and spills in the program's log.
OPTIONS = ("--std=c++17", "-ftz=true", "--ptxas-options=-v")
MERGE = "merge_splits"
INDEX_ROWS = "index_rows"

_NVRTC = "pip install 'nvidia-cuda-nvrtc>=13', or run where torch's own CUDA libraries are installed"


@dataclass(frozen=True)
class Program:
    """A text to compile and the one entry point in it."""

    name: str
    text: str
    threads: int
    dynamic_shared_bytes: int = 0


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of an entry point."""

    registers: int
    spill_bytes: int  # stores and loads of registers that did not fit
    static_shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled program."""

    cubin: bytes
    resources: Resources


def attention_program(variant: Variant) -> Program:
    """The main kernel in one shape."""
    text = source.flatten("sparse_mla.cu") + variant.entry + "\n"
    return Program(variant.name, text, variant.threads, variant.shared_bytes)


def merge_program() -> Program:
    """The kernel that joins the splits of a row, for every head count and KV dtype."""
    warps = max(MERGE_WARPS)
    agreed = f"sizeof(MergeWarp) == {MERGE_WARP_BYTES} && kMostWarps == {warps}"
    text = source.flatten("merge.cu") + f'static_assert({agreed}, "what the launcher asks for");\n'
    return Program(MERGE, text, 32 * warps, warps * MERGE_WARP_BYTES)


def index_rows_program() -> Program:
    """The kernel that translates request-local positions to rows."""
    return Program(INDEX_ROWS, source.flatten("index_rows.cu"), 256)


def nvrtc_version() -> str:
    """Version of the NVRTC that CuPy loads, as "13.0".

    Raises:
        CompileError: CuPy or NVRTC is not installed.
    """
    return "{}.{}".format(*_version(_nvrtc()))


def build(program: Program, arch: str) -> Binary:
    """Compile for `arch`, such as "sm_121".

    Raises:
        CompileError: with the architecture, the NVRTC version and the compiler's log.
    """
    nvrtc = _nvrtc()
    version = "{}.{}".format(*_version(nvrtc))
    number = re.fullmatch(r"sm_(\d+)", arch)
    known = sorted(nvrtc.getSupportedArchs())
    if number is not None and int(number[1]) < 80:
        raise CompileError(f"the kernels cannot run on {arch}: they need sm_80 or newer (bf16 MMA and cp.async)")
    if number is None or int(number[1]) not in known:
        listed = ", ".join(f"sm_{arch}" for arch in known)
        why = f"NVRTC {version} cannot compile for {arch} (it knows {listed})"
        if number is None:
            raise CompileError(f"{why}; an architecture reads sm_NN")
        raise CompileError(f"{why}; {'12.9 does' if arch == 'sm_121' else 'a newer one may'}: {_NVRTC}")
    cubin, log = _compile(nvrtc, program, arch, OPTIONS)
    if "Used" not in log:
        # NVRTC 13 keeps what it compiled in the driver's cache of computations, and what comes from there has no log.
        cubin, log = _compile(nvrtc, program, arch, (*OPTIONS, "--no-cache"))
    return Binary(cubin, read_resources(log, program.name, version))


def _compile(nvrtc, program: Program, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    handle = nvrtc.createProgram(program.text, f"{program.name}.cu", (), ())
    try:
        _run(lambda: nvrtc.compileProgram(handle, (*options, f"-arch={arch}")))
        log = nvrtc.getProgramLog(handle)
        cubin = nvrtc.getCUBIN(handle) + b"\0"  # CuPy 14.2 cuts the last byte, a zero, as if it ended a C string
    except nvrtc.NVRTCError as error:
        log, version = nvrtc.getProgramLog(handle), "{}.{}".format(*_version(nvrtc))
        raise CompileError(f"{program.name} does not compile for {arch} with NVRTC {version}: {error}\n{log}") from None
    finally:
        nvrtc.destroyProgram(handle)
    return cubin, log


def _run(compilation: Callable[[], None]) -> None:
    """Run one compilation and keep the handlers of SIGINT and SIGTERM as they are.

    NVRTC puts handlers of its own in their place when it begins. They call exit() wherever the compiler happens to be:
    2 of 28 interrupted compilations hung in it for good (NVRTC 13.0), and with them every rank that waited for the
    cache's lock; where other threads took the signal, 6 of 49 crashed. So it runs beside the main thread, which alone
    can put handlers back, and does so until it is done.
    """
    if threading.current_thread() is not threading.main_thread():
        compilation()
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compilation()
        except BaseException as error:
            errors.append(error)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    beside = threading.Thread(target=run, name="nvrtc", daemon=True)
    beside.start()
    while beside.is_alive():
        try:
            for number, handler in handlers.items():
                if handler is not None:  # None: it was not Python that set it
                    signal.signal(number, handler)
            beside.join(0.001)
        except BaseException as interrupt:  # raised once the compiler has let go of the program
            errors.insert(0, interrupt)
    if errors:
        raise errors[0]


def read_resources(log: str, name: str, version: str) -> Resources:
    """Registers, spills and static shared memory from the lines that ptxas writes with -v."""
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise CompileError(f"NVRTC {version} does not report the resources of {name}; its log reads:\n{log}")
    shared = re.search(r"(\d+) bytes smem", log)
    return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), int(shared[1]) if shared else 0)


def _nvrtc():
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise CompileError(f"CuPy cannot be imported ({error}): {CUPY.pip}") from None
    return nvrtc


def _version(nvrtc) -> tuple[int, int]:
    # Importing CuPy proves nothing: the library is looked for at the first call.
    try:
        return nvrtc.getVersion()
    except Exception as error:  # CuPy's loader and cuda-pathfinder raise types of their own, ImportError among them
        raise CompileError(f"NVRTC cannot be loaded ({type(error).__name__}: {error}): {_NVRTC}") from error
