"""Compilation by NVRTC, through CuPy's bindings: a cubin for a named architecture, with neither GPU nor driver."""

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from overlay.kernel import source
from overlay.kernel.errors import CompileError
from overlay.kernel.variants import Variant

# -ftz as CuPy's own compiler adds it; -v makes ptxas report registers and spills in the program's log.
OPTIONS = ("--std=c++17", "-ftz=true", "--ptxas-options=-v")
MERGE = "merge_splits"
INDEX_ROWS = "index_rows"

_CUPY = "pip install cupy-cuda12x (or cupy-cuda13x in its place, never both)"
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
    return Program(MERGE, source.flatten("merge.cu"), 128)


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
    if number is None or int(number[1]) not in known:
        listed = ", ".join(f"sm_{arch}" for arch in known)
        raise CompileError(
            f"NVRTC {version} cannot compile for {arch} (it knows {listed}); sm_121 needs 12.9: {_NVRTC}"
        )
    handle = nvrtc.createProgram(program.text, f"{program.name}.cu", (), ())
    try:
        with signals_blocked():
            nvrtc.compileProgram(handle, (*OPTIONS, f"-arch={arch}"))
        log = nvrtc.getProgramLog(handle)
        cubin = nvrtc.getCUBIN(handle) + b"\0"  # CuPy 14.2 cuts the last byte, a zero, as if it ended a C string
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(handle)
        raise CompileError(f"{program.name} does not compile for {arch} with NVRTC {version}: {error}\n{log}") from None
    finally:
        nvrtc.destroyProgram(handle)
    return Binary(cubin, read_resources(log, program.name, version))


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from this thread for the seconds that one compilation takes.

    NVRTC puts handlers of its own in their place while it compiles, and they call exit() wherever the compiler happens
    to be: 2 of 28 interrupted compilations hung in it for good (NVRTC 13.0), and with them every rank that waited for
    the cache's lock. What comes meanwhile takes effect afterwards, unless NVRTC drops it when it puts the old handlers
    back; SIGKILL ends a compilation at any time.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
        raise CompileError(f"CuPy cannot be imported ({error}): {_CUPY}") from None
    return nvrtc


def _version(nvrtc) -> tuple[int, int]:
    # Importing CuPy proves nothing: the library is looked for at the first call.
    try:
        return nvrtc.getVersion()
    except Exception as error:  # CuPy's loader and cuda-pathfinder raise types of their own, ImportError among them
        raise CompileError(f"NVRTC cannot be loaded ({type(error).__name__}: {error}): {_NVRTC}") from error
