"""What a tile costs in instructions: the main loop of a compiled variant, counted in its machine code."""

import collections
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from overlay.errors import OverlayError
from overlay.kernel import build
from overlay.kernel.variants import LATENT, Variant


def products(variant: Variant) -> int:
    """MMAs of one warp for one tile: scores and values over its slice, for its heads."""
    dim_tiles, head_tiles = LATENT // variant.slices // 16, variant.group_heads // 8
    return 2 * dim_tiles * head_tiles * (variant.tile_rows // 16)


def loop_counts(variant: Variant, arch: str) -> dict[str, int]:
    """Instructions of one warp for one tile by opcode, as ptxas laid the loop out; "all" is their sum.

    The rarely taken branch that raises the maxima lies inside the loop and is counted with it.

    Raises:
        OverlayError: no nvdisasm that reads this architecture's code, or a loop that cannot be found.
    """
    code = _disassemble(build.build(build.attention_program(variant), arch).cubin)
    loop = _main_loop(code, products(variant))
    return dict(collections.Counter(_opcode(line) for line in loop)) | {"all": len(loop)}


def _disassemble(cubin: bytes) -> list[str]:
    """Lines of machine code: labels, and instructions without their addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = _nvdisasm()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(f"{tool} cannot read the kernel's machine code: {done.stderr.strip()}")
    found = (re.match(r"\s*(?:(\.L_x_\d+):|/\*[0-9a-f]+\*/\s+(.*?);)", line) for line in done.stdout.splitlines())
    return [match[1] or match[2] for match in found if match]


def _nvdisasm() -> str:
    bundled = Path(sysconfig.get_paths()["purelib"], "triton/backends/nvidia/bin/nvdisasm")
    # A toolkit's own is often older than the NVRTC that compiled here.
    tool = str(bundled) if bundled.exists() else shutil.which("nvdisasm")
    if tool is None:
        raise OverlayError("nvdisasm is missing: it comes with Triton (and so with vLLM) and with the CUDA toolkit")
    return tool


def _main_loop(code: Sequence[str], wanted: int) -> list[str]:
    """The shortest stretch between a label and a jump back to it that holds `wanted` MMAs or more."""
    labels = {line: position for position, line in enumerate(code) if line.startswith(".L_x_")}
    loops = []
    for end, line in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        start = labels.get(target[1], end) if target else end
        body = [text for text in code[start:end] if not text.startswith(".L_x_")]
        if sum(_opcode(text) == "HMMA" for text in body) >= wanted:
            loops.append([*body, line])
    if not loops:
        raise OverlayError(f"no loop of {wanted} matrix products in the machine code")
    return min(loops, key=len)


def _opcode(line: str) -> str:
    words = [word for word in line.split() if not word.startswith("@")]
    return words[0].split(".")[0]
