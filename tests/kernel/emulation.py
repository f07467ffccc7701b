"""The kernel's own source compiled for the CPU by the emulator beside this file, behind the real launcher."""

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from overlay.kernel import source
from overlay.kernel.variants import VARIANTS, Variant

HERE = Path(__file__).parent
SCALARS = {int: ctypes.c_int64, np.int32: ctypes.c_int32, np.uint32: ctypes.c_uint32, np.float32: ctypes.c_float}
KERNELS = ("sparse_mla", "merge_splits", "index_rows")


def signature(kernel: str) -> list[tuple[str, str]]:
    """Parameters (type, name) of a kernel as its source declares them."""
    text = source.flatten({"merge_splits": "merge.cu"}.get(kernel, f"{kernel}.cu")).replace("\\\n", " ")
    opening = r"blocks\)\s*name\(" if kernel == "sparse_mla" else rf"\b{kernel}\("
    listed = re.search(opening + r"([^)]*)\)\s*\{", text)[1]
    return [tuple(re.match(r"(.*?)(\w+)$", parameter.strip()).groups()) for parameter in listed.split(",")]


def build(
    directory: Path, variants: Sequence[Variant] = VARIANTS, changes: Sequence[tuple[str, str]] = ()
) -> ctypes.CDLL:
    """Compile the kernels into one shared library, with `changes` made to their text first.

    Skips the test where there is no C++ compiler.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernel's source cannot be run on the CPU")
    parts = [f'#include "{HERE / "emulator.h"}"']
    seen: set[str] = set()
    for name in ("sparse_mla.cu", "merge.cu", "index_rows.cu"):
        for file, text in re.findall(r'#line \d+ "(.*?)"\n(.*?)(?=#line|\Z)', source.flatten(name), re.DOTALL):
            if file != "ptx.cuh" and (file, text) not in seen:
                seen.add((file, text))
                parts.append(text)
    parts += [variant.entry for variant in variants]
    for kernel in KERNELS:
        parameters = signature(kernel)
        types = ", ".join(kind for kind, _ in parameters)
        declared = ", ".join(f"{kind}{name}_" for kind, name in parameters)
        passed = ", ".join(f"{name}_" for _, name in parameters)
        parts.append(
            f'extern "C" const char* launch_{kernel}(void (*kernel)({types}), int grid_x, int grid_y, int grid_z,'
            f" int threads, int reversed, int late, {declared}) {{\n"
            f"  return emulator::launch(kernel, grid_x, grid_y, grid_z, threads, reversed, late, {passed});\n}}"
        )
    parts.append(
        'extern "C" void allow(const u8* first, i64 bytes) { emulator::readable.push_back({first, bytes}); }\n'
        'extern "C" void allow_all() { emulator::readable.clear(); }\n'
        'extern "C" i64 conflicts() { return emulator::bank_conflicts; }\n'
        'extern "C" void poison(u32 word) { emulator::poison = word; }'
    )
    text = "\n".join(parts).replace(
        "extern __shared__ __align__(1024) u8 dynamic_shared[];", "u8* dynamic_shared = emulator::shared_memory;"
    )
    # What is declared in the source is an object of the host's, beyond the reach of a shared address.
    text = re.sub(r"__shared__ (\w+) (\w+);", r"\1& \2 = *reinterpret_cast<\1*>(emulator::shared_memory);", text)
    for old, new in changes:
        assert old in text, f"nothing to change: {old}"
        text = text.replace(old, new)
    program, library = directory / "kernel.cpp", directory / "kernel.so"
    program.write_text(text)
    command = [compiler, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", program, "-o", library]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    loaded = ctypes.CDLL(str(library))
    loaded.conflicts.restype = ctypes.c_int64
    loaded.allow.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    loaded.poison.argtypes = (ctypes.c_uint32,)
    return loaded


@dataclass
class EmulatedFunction:
    """Stands where the launcher expects a `cupy.cuda.Function`."""

    compiled: ctypes.CDLL
    kernel: str  # which of KERNELS
    entry: str
    reversed: bool = False  # the last warp runs first
    late: bool = False  # cp.async writes when it is waited for
    launches: list[tuple] = field(default_factory=list)

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        self.launches.append((grid, block, shared_mem))
        launch = getattr(self.compiled, f"launch_{self.kernel}")
        launch.restype = ctypes.c_char_p
        sizes = (*grid, 1, 1)[:3]
        entry = ctypes.cast(getattr(self.compiled, self.entry), ctypes.c_void_p)
        integers = (ctypes.c_int(value) for value in (*sizes, block[0], self.reversed, self.late))
        failure = launch(entry, *integers, *itertools.starmap(_scalar, zip(args, signature(self.kernel), strict=True)))
        assert not failure, failure.decode()


def _scalar(value, parameter):
    kind, name = parameter
    converted = SCALARS[type(value)](value)
    wide = "*" in kind or "i64" in kind
    assert ctypes.sizeof(converted) == (8 if wide else 4), f"{name} is {kind}and was given {type(value).__name__}"
    assert ("float" in kind and "*" not in kind) == (type(value) is np.float32), f"{name} is {kind}"
    return converted
