"""A driver for GPUs that are not there: two stub libraries that make the installed vLLM plan for any capability.

vLLM's CUDA code paths need two libraries of the driver. Its compiled extensions link ``libcuda.so.1``, so without it
``vllm.platforms.cuda`` cannot be imported; and it asks ``libnvidia-ml.so.1`` which GPUs there are. This module builds
both with the machine's C compiler (two seconds, once): every driver call answers CUDA_ERROR_NO_DEVICE, and NVML
describes the wanted GPU. `environment` puts them first on ``LD_LIBRARY_PATH``; in a process started with it,
``vllm.platforms.current_platform`` is the real ``NvmlCudaPlatform`` and nothing can touch a GPU.

The driver's symbols are read from the compiled libraries and CUDA headers of the installed packages, so an upgrade of
any of them is followed.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from overlay.errors import OverlayError
from overlay.kernel import cache
from overlay.sources import VllmSources

LIBCUDA = "libcuda.so.1"
LIBNVML = "libnvidia-ml.so.1"
NVML_SOURCE = Path(__file__).with_name("nvml.c")
PREFIX = "OVERLAY_REHEARSAL_"

GIB = 1024**3


@dataclass(frozen=True)
class Board:
    """What is known of the usual board of a capability: memory in bytes, multiprocessors, opt-in shared memory."""

    name: str
    memory: int
    multiprocessors: int
    shared_memory: int
    integrated: bool = False  # shares the host's memory: NVML knows no size, and vLLM asks CUDA


BOARDS = {
    (8, 0): Board("NVIDIA A100-SXM4-80GB", 80 * GIB, 108, 166912),
    (8, 9): Board("NVIDIA L40S", 45 * GIB, 142, 101376),
    (9, 0): Board("NVIDIA H200", 141 * GIB, 132, 232448),
    (10, 0): Board("NVIDIA B200", 180 * GIB, 148, 232448),
    (12, 0): Board("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96 * GIB, 188, 101376),
    (12, 1): Board("NVIDIA GB10", int(121.7 * GIB), 48, 101376, integrated=True),
}


def board(capability: tuple[int, int]) -> Board:
    """The usual board of `capability`, or a plain one of 80 GiB where none is known."""
    unknown = Board("rehearsed GPU {}.{}".format(*capability), 80 * GIB, 108, 101376)
    return BOARDS.get(capability, unknown)


class DriverError(OverlayError):
    """The stub driver cannot be built; the message says what to install."""


def environment(
    capability: tuple[int, int],
    devices: int = 1,
    name: str | None = None,
    memory: int | None = None,
    base: Mapping[str, str] = os.environ,
    directory: Path | None = None,
) -> dict[str, str]:
    """The environment of a process in which vLLM sees `devices` GPUs of `capability` and no real one.

    `memory` is in bytes per device, 0 for a board whose NVML knows none (GB10); it and `name` default to the usual
    board's. The stub libraries are built on first use into `directory` (default: the user's cache). Raises DriverError.
    """
    usual = board(capability)
    libraries = build(directory)
    # A selection of real devices means nothing among rehearsed ones, and index 3 of one device stops vLLM.
    env = {key: value for key, value in base.items() if key != "CUDA_VISIBLE_DEVICES" and not key.startswith(PREFIX)}
    env[PREFIX + "CAPABILITY"] = f"{capability[0]}.{capability[1]}"
    env[PREFIX + "DEVICES"] = str(devices)
    env[PREFIX + "NAME"] = name or usual.name
    env[PREFIX + "MEMORY"] = str(usual.memory if memory is None else memory)
    paths = [str(libraries), *filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env


def build(directory: Path | None = None) -> Path:
    """Build both libraries unless a build of the same source is there; return the folder that holds them.

    Safe when several processes call it at once: one builds under a lock, and the finished folder appears by rename.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise DriverError(f"a rehearsal needs Linux on x86-64 or aarch64; this is {sys.platform} {platform.machine()}")
    sources = {LIBCUDA: cuda_source(wanted_symbols(package_folders())), LIBNVML: NVML_SOURCE.read_text()}
    key = hashlib.sha256("\0".join((platform.machine(), *sources.values())).encode()).hexdigest()[:16]
    root = own(cache.default_directory()) / "driver" if directory is None else directory.absolute()
    target = own(root) / key
    if target.is_dir():
        return own(target)
    compiler = find_compiler()
    with locked(root / "lock"):
        if target.is_dir():
            return own(target)
        with tempfile.TemporaryDirectory(dir=root, prefix="build-") as scratch:
            finished = Path(scratch) / key
            finished.mkdir(mode=0o700)
            for library, source in sources.items():
                compile_library(compiler, source, finished / library)
            finished.rename(target)
    return target


def own(folder: Path) -> Path:
    """`folder`, made if need be, which nobody else can write to. Raises DriverError.

    What lies in it is loaded into every process of a rehearsal, as a kernel from the kernel cache is.
    """
    try:
        cache.prepare(folder)
    except OSError as problem:
        raise DriverError(f"{folder} cannot hold the rehearsal's driver: {problem.strerror or problem}") from None
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it when the process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def find_compiler() -> str:
    """The C compiler to use: $CC, else cc, gcc or clang. Raises DriverError naming the package to install."""
    for candidate in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        found = shutil.which(candidate)
        if found:
            return found
    raise DriverError(
        "a rehearsal builds two small stub libraries and no C compiler was found (CC, cc, gcc, clang).\n"
        "Install one: `apt-get install gcc libc6-dev` (Debian, Ubuntu) or `dnf install gcc` (Fedora, RHEL)."
    )


def compile_library(compiler: str, source: str, output: Path) -> None:
    """Compile C `source` into the shared library `output`. Raises DriverError with the compiler's own words."""
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", f"-Wl,-soname,{output.name}", "-o", str(output)]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        raise DriverError(
            f"{compiler} cannot build the stub {output.name}; it needs the C library's headers "
            f"(`apt-get install libc6-dev`, `dnf install glibc-devel`). It said:\n{done.stderr.strip()}"
        )


def cuda_source(names: Iterable[str]) -> str:
    """C source of a libcuda.so.1 that has `names` and no device.

    CUDA_ERROR_NO_DEVICE is 100. The two error-text functions do answer: callers print what they return unchecked.
    """
    text = ("cuGetErrorName", "cuGetErrorString")
    lines = [
        f"int {name}(int error, const char **out) {{ (void)error; *out = {value}; return 0; }}"
        for name, value in zip(text, ('"CUDA_ERROR_NO_DEVICE"', '"no CUDA-capable device is detected"'), strict=True)
    ]
    lines += [f"int {name}(void) {{ return 100; }}" for name in sorted({*names} - {*text})]
    return "\n".join(lines) + "\n"


def package_folders() -> list[Path]:
    """The folders whose compiled libraries a rehearsal may load: of packages on sys.path, and vLLM's own elsewhere."""
    folders = [Path(entry) for entry in sys.path if entry]
    holds_packages = ("site-packages", "dist-packages")
    found = [f for f in folders if f.is_dir() and (f.name in holds_packages or (f / "vllm").is_dir())]
    vllm = VllmSources.find()  # `pip install -e` puts it on no path
    return found if vllm is None or vllm.root.parent in found else [*found, vllm.root]


def wanted_symbols(folders: Iterable[Path]) -> set[str]:
    """The driver's names that packages below `folders` link, or declare for what they compile when they run.

    Triton compiles a helper against its own copy of cuda.h and loads it; with a name missing, GLM-5.3's model module
    cannot be imported. Every ``cuName`` in such a header is taken: one too many does no harm.
    """
    names: set[str] = set()
    for folder in folders:
        for parent, _, files in os.walk(folder):
            for file in files:
                path = os.path.join(parent, file)
                if file == "cuda.h":
                    names |= set(re.findall(r"\bcu[A-Z]\w*", Path(path).read_text(errors="replace")))
                elif ".so" in file:
                    with open(path, "rb") as handle:
                        names |= linked_symbols(handle)
    return names


def linked_symbols(elf: BinaryIO) -> set[str]:
    """The undefined ``cuName`` symbols of one library, if libcuda.so.1 is among the libraries it needs.

    Reads the section headers, dynamic section and dynamic symbols of a little-endian 64-bit ELF file (both processors
    are); anything else, such as a linker script named ``.so``, has none.
    """
    header = elf.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return set()
    table_offset, entry_size, entries = (*struct.unpack_from("<Q", header, 40), *struct.unpack_from("<HH", header, 58))
    elf.seek(table_offset)
    table = elf.read(entry_size * entries)
    # (name, type, flags, address, offset, size, link, info, alignment, size of one entry)
    sections = [struct.unpack_from("<IIQQQQIIQQ", table, i * entry_size) for i in range(len(table) // entry_size)]

    def content(section: tuple[int, ...]) -> bytes:
        elf.seek(section[4])
        return elf.read(section[5])

    def text(strings: bytes, offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    needed, undefined = set(), set()
    dynamic_type, symbols_type, tag_needed = 6, 11, 1
    for section in sections:
        if section[1] == dynamic_type:
            strings = content(sections[section[6]])
            entries_of = struct.iter_unpack("<QQ", content(section))
            needed |= {text(strings, value) for tag, value in entries_of if tag == tag_needed}
    if LIBCUDA not in needed:
        return set()
    for section in sections:
        if section[1] == symbols_type:
            strings = content(sections[section[6]])
            symbols = struct.iter_unpack("<IBBHQQ", content(section))
            undefined |= {text(strings, name) for name, _, _, defined_in, _, _ in symbols if defined_in == 0}
    return {name for name in undefined if re.fullmatch(r"cu[A-Z]\w*", name)}
