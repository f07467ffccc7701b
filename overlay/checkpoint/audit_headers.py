"""safetensors headers, read with suspicion: a checkpoint under audit may be half downloaded, or not safetensors at all.

Format: 8 bytes little-endian header length, a JSON object of that length, then the tensors' bytes. The rules and the
limit of 100 MB are those of the reference implementation (huggingface/safetensors, `tensor.rs`).
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError

LARGEST_HEADER = 100_000_000
LFS_POINTER = b"version https://git-lfs"
# Bits of one element.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class HeaderError(OverlayError):
    """A file that no loader can read; the message says what is wrong with it."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. `start` and `end` are byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by name; no tensor data is read. Raises HeaderError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            if first and LFS_POINTER.startswith(first):
                raise HeaderError("is a Git LFS pointer, not the file itself; run `git lfs pull`")
            if len(first) < 8:
                raise HeaderError(f"ends after {len(first)} bytes; a safetensors file starts with 8 bytes of length")
            length = int.from_bytes(first, "little")
            if length > LARGEST_HEADER:
                raise HeaderError(f"claims a header of {length} bytes (limit {LARGEST_HEADER}); it is not safetensors")
            if length > size - 8:
                raise HeaderError(f"is cut off: {size} bytes, and its header alone takes {length + 8}")
            raw = stream.read(length)
    except OSError as problem:
        raise HeaderError(f"cannot be read: {problem.strerror or problem}") from problem
    return _tensors(file, _parse(raw), 8 + length, size)


def _parse(raw: bytes) -> dict:
    """The header's JSON object. A name that stands in it twice is an error: loaders disagree about which one counts."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise HeaderError(f"has a header that is not valid JSON: {str(problem)[:200]}") from problem
    if not isinstance(header, dict):
        raise HeaderError(f"has a header that is a JSON {type(header).__name__}, not an object")
    return header


def _unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands in it twice")
        found[key] = value
    return found


def _tensors(file: Path, header: dict, base: int, size: int) -> dict[str, Tensor]:
    tensors = {name: _tensor(file, name, entry, base) for name, entry in header.items() if name != "__metadata__"}
    end = base
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise HeaderError(f"has damaged offsets: {tensor.name} {kind}")
        end = tensor.end
    if end > size:
        raise HeaderError(f"is cut off: {size} of {end} bytes are there (an interrupted download or copy)")
    if end < size:
        raise HeaderError(f"has {size - end} bytes after its last tensor; it is damaged")
    return tensors


def _tensor(file: Path, name: str, entry: object, base: int) -> Tensor:
    if not isinstance(entry, dict):
        raise HeaderError(f"has no description of {name}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"gives {name} the unknown dtype {dtype!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"gives {name} the shape {shape!r} and the offsets {offsets!r}")
    tensor = Tensor(name, dtype, tuple(shape), file, base + offsets[0], base + offsets[1])
    if tensor.elements * BITS[dtype] != tensor.bytes * 8:
        raise HeaderError(f"gives {name} {tensor.bytes} bytes for {tensor.elements} elements of {dtype}")
    return tensor


def _sizes(values: object) -> bool:
    # bool is an int to isinstance, and `true` is no size
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def read_bytes(tensors: Iterable[Tensor], gap: int = 1 << 16) -> dict[str, bytes]:
    """The bytes of small tensors, by name, in file order and neighbours in one read.

    A big checkpoint has tens of thousands of scalar scales, which writers put side by side: this takes a few reads per
    shard where one read per tensor takes minutes on a network disk. Raises HeaderError where a file got shorter.
    """
    found: dict[str, bytes] = {}
    by_file: dict[Path, list[Tensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, wanted in by_file.items():
        with file.open("rb") as stream:
            for run in _runs(sorted(wanted, key=lambda tensor: tensor.start), gap):
                start, end = run[0].start, run[-1].end
                block = os.pread(stream.fileno(), end - start, start)
                if len(block) != end - start:
                    raise HeaderError(f"{file.name} changed while it was read")
                found |= {tensor.name: block[tensor.start - start : tensor.end - start] for tensor in run}
    return found


def _runs(ordered: list[Tensor], gap: int) -> list[list[Tensor]]:
    """Consecutive tensors with less than `gap` bytes between them, and no run above 16 gaps long."""
    runs: list[list[Tensor]] = []
    for tensor in ordered:
        if runs and tensor.start - runs[-1][-1].end < gap and tensor.end - runs[-1][0].start < 16 * gap:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
