"""Early starts: what reaches the driver, and where there are none."""

import ctypes
import sys
import types

import numpy as np
import pytest
import torch

from overlay.kernel import launch
from overlay.kernel.early import EarlyFunction, EarlyStartRefused, starting_early
from overlay.kernel.errors import KernelError
from overlay.kernel.variants import variants_for

CPU = torch.device("cpu")
STREAM = types.SimpleNamespace(ptr=1234)


class Function:
    ptr = 77


@pytest.fixture
def driver():
    return pytest.importorskip("cuda.bindings.driver")


def recording(driver, answer):
    """NVIDIA's bindings with a launch that notes what it is given."""
    launches = []

    def launch(config, function, parameters, extra):
        attributes = [(one.id, one.value.programmaticStreamSerializationAllowed) for one in config.attrs]
        grid, block = ([getattr(config, f"{kind}Dim{axis}") for axis in "XYZ"] for kind in ("grid", "block"))
        launches.append((tuple(grid), tuple(block), config.sharedMemBytes, int(config.hStream), attributes))
        launches.append((function, parameters, extra))
        return (answer,)

    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUresult")
    return types.SimpleNamespace(**{name: getattr(driver, name) for name in names}, cuLaunchKernelEx=launch), launches


def test_a_launch_reaches_the_driver_with_its_types_and_the_attribute(driver):
    bindings, launches = recording(driver, driver.CUresult.CUDA_SUCCESS)
    EarlyFunction(Function, bindings)((5, 2), (128,), (1 << 40, np.int32(-3), np.float32(0.5)), 2048, stream=STREAM)
    attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert launches == [
        ((5, 2, 1), (128, 1, 1), 2048, 1234, [(attribute, 1)]),
        (77, ((1 << 40, -3, 0.5), (ctypes.c_int64, ctypes.c_int32, ctypes.c_float)), 0),
    ]


def test_a_refusal_names_the_drivers_reason(driver):
    bindings, _ = recording(driver, driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(EarlyStartRefused, match="CUDA_ERROR_INVALID_VALUE"):
        EarlyFunction(Function, bindings)((1,), (32,), (), stream=STREAM)


@pytest.mark.parametrize(("capability", "early"), [((8, 9), False), ((9, 0), True), ((12, 1), True)])
def test_only_where_the_device_can(monkeypatch, driver, capability, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert isinstance(starting_early(Function, CPU), EarlyFunction) == early


def test_without_the_bindings_the_function_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert starting_early(Function, CPU) is Function


@pytest.mark.parametrize("plainly", [True, False])
def test_a_driver_that_refuses_early_starts_gets_plain_ones(monkeypatch, on_cpu, caplog, driver, plainly):
    bindings, _ = recording(driver, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)
    tried = []

    def attempt(kernel, variant):
        tried.append((variant.name, kernel.merge_starts_early))
        if kernel.merge_starts_early:
            kernel._merge((1,), (32,), (), stream=STREAM)
        elif not plainly:
            raise KernelError("an error of an earlier kernel")

    monkeypatch.setattr(launch, "load_function", lambda device, program: Function)
    monkeypatch.setattr(launch, "starting_early", lambda function, device: EarlyFunction(function, bindings))
    monkeypatch.setattr(launch, "_try_attention", attempt)
    load = launch._load_attention.__wrapped__
    if not plainly:
        with pytest.raises(KernelError, match="an earlier kernel"):
            load(CPU, 8, "fp8")
        return
    assert not load(CPU, 8, "fp8").merge_starts_early
    first, *others = (variant.name for variant in variants_for(8, "fp8"))
    assert tried == [(first, True), (first, False), *((name, False) for name in others)]
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text
