"""Why the installed vLLM's own sparse-MLA path on capability 12.x cannot serve rope-free rows, by what is installed.

The model class came with vLLM 0.30.0, whose compiled cache writer still refuses rows without rope; from 0.31.0 it
takes them. The writer's refusal is looked for in the library itself: a development build's version does not tell.
FlashInfer's kernels for rows without rope came with its 0.7.0; an older one passes vLLM's check and fails at the first
batch.
"""

import mmap
from functools import cache
from importlib import metadata
from pathlib import Path

_REFUSAL = b"pe_dim must be 64 for fp8_ds_mla"
_FLASHINFER = "flashinfer-python"
_FLASHINFER_NOPE = (0, 7, 0)


@cache
def defect(vllm_root: Path) -> str | None:
    """What keeps the native path from working below `vllm_root`, or None."""
    for library in sorted(vllm_root.glob("_C*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(_REFUSAL) >= 0:
                return "this vLLM's cache writer refuses rows without rope (fixed in 0.31.0)"
    version = _flashinfer_version()
    if version is not None and version < _FLASHINFER_NOPE:
        return f"FlashInfer {'.'.join(map(str, version))} has no kernel for rows without rope (0.7.0 has)"
    return None


def _flashinfer_version() -> tuple[int, int, int] | None:
    """Release of the installed FlashInfer; None where there is none (vLLM's selector says so itself)."""
    try:
        parts = metadata.version(_FLASHINFER).split(".")
    except metadata.PackageNotFoundError:
        return None
    numbers = [int(part) for part in parts[:3] if part.isdigit()]
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None
