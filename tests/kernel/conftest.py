"""The emulated kernels, behind the real launcher, with CPU tensors."""

import ctypes
import types
from collections.abc import Callable, Iterator

import pytest
import torch

from overlay.kernel import launch
from overlay.kernel.variants import variants_for
from tests.kernel import emulation

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel, compiled for the CPU."""
    return emulation.build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the three questions that the launcher asks of CUDA."""
    monkeypatch.setattr(launch, "cupy_stream", lambda pointer: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def emulated(on_cpu: None, library: ctypes.CDLL) -> Iterator[Callable[..., launch.SparseMLA]]:
    """`emulated(heads, kv_dtype, reversed=..., late=..., library=...)` -> the launcher over emulated functions."""

    def make(heads: int, kv_dtype: str, library: ctypes.CDLL = library, **schedule: bool) -> launch.SparseMLA:
        functions = {
            variant: emulation.EmulatedFunction(library, "sparse_mla", variant.name, **schedule)
            for variant in variants_for(heads, kv_dtype)
        }
        merge = emulation.EmulatedFunction(library, "merge_splits", "merge_splits", **schedule)
        return launch.SparseMLA(CPU, heads, kv_dtype, functions, merge)

    yield make
    library.allow_all()
    library.poison(0xFFFFFFFF)
