"""The flattened source and its digest."""

import subprocess
import sys

import pytest

from overlay.kernel import source
from overlay.kernel.errors import KernelError
from overlay.kernel.variants import VARIANTS

KERNELS = ("sparse_mla.cu", "merge.cu", "index_rows.cu")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of `cuda/` that a test may change."""
    for path in source.DIRECTORY.glob("*.cu*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(source, "DIRECTORY", tmp_path)
    source.digest.cache_clear()
    source.flatten.cache_clear()
    yield tmp_path
    source.digest.cache_clear()
    source.flatten.cache_clear()


@pytest.mark.parametrize("name", KERNELS)
def test_one_text_without_includes(name):
    text = source.flatten(name)
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("mma.sync.aligned.m16n8k16") == 2  # ptx.cuh stands in it once
    assert text.count('#line 1 "ptx.cuh"') == 1


def test_lines_are_attributed_to_their_files():
    lines = source.flatten("sparse_mla.cu").splitlines()
    at = next(i for i, line in enumerate(lines) if "struct SparseMla {" in line)
    marker = next(i for i in range(at, -1, -1) if lines[i].startswith("#line"))
    number, name = lines[marker].split()[1:]
    original = (source.DIRECTORY / name.strip('"')).read_text().splitlines()
    assert original[int(number) + at - marker - 2] == lines[at]


def test_every_header_of_the_folder_is_used():
    texts = "".join(source.flatten(path.name) for path in source.DIRECTORY.glob("*.cu"))
    for path in source.DIRECTORY.glob("*.cuh"):
        assert f'#line 1 "{path.name}"' in texts, path


@pytest.mark.parametrize("line", ["#include <cuda_bf16.h>", '#include "../overlay/x.cuh"', '#  include "missing.cuh"'])
def test_includes_from_elsewhere_are_refused(copy, line):
    (copy / "ptx.cuh").write_text(f"// first\n{line}\n")
    with pytest.raises(KernelError, match=r"ptx\.cuh:2 includes"):
        source.flatten("merge.cu")


def test_a_missing_file_is_named(copy):
    (copy / "merge.cu").unlink()
    with pytest.raises(KernelError, match=r"merge\.cu.*incomplete"):
        source.flatten("merge.cu")


@pytest.mark.parametrize("name", ["ptx.cuh", "index_rows.cu"])
def test_digest_follows_the_files(copy, name):
    before = source.digest()
    (copy / name).write_text((copy / name).read_text() + "\n")
    source.digest.cache_clear()
    assert source.digest() != before


def test_digest_follows_the_variants(copy, monkeypatch):
    before = source.digest()
    monkeypatch.setattr(source, "VARIANTS", VARIANTS[:-1])
    source.digest.cache_clear()
    assert source.digest() != before


def test_digest_needs_the_standard_library_alone():
    code = (
        "import sys; from overlay.kernel import source; source.digest();"
        "print({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'cupy', 'vllm', 'wrapt'})"
    )
    root = source.DIRECTORY.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
