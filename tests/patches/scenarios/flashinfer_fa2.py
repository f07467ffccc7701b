"""vLLM's real Hopper backend on 12.1, and FlashInfer's real planning checks and build of its FA2 kernel."""

import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from overlay.patches.flashinfer_fa2 import BACKEND, FA_COMMON, SM90
from tests.patches import harness

OPT_IN = 101_376  # bytes of shared memory per block on 12.x


def capabilities(backend: Any) -> dict[str, bool]:
    from vllm.platforms.interface import DeviceCapability

    return {
        f"{a}.{b}": backend.supports_compute_capability(DeviceCapability(a, b)) for a, b in ((12, 1), (12, 0), (9, 0))
    }


def made(module: ModuleType, max_tokens: int) -> dict[str, Any]:
    """The real _SM90State on CPU tensors: which kernel its FlashInfer wrapper is asked for."""
    asked: dict[str, Any] = {}

    def wrapper(workspace: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        asked.update(backend=kwargs["backend"], rows=kwargs["kv_len_arr"].shape[0], graph=kwargs["use_cuda_graph"])
        return SimpleNamespace()

    parameters = inspect.signature(module._SM90State.__init__).parameters
    sizes = {
        "device": torch.device("cpu"), "num_heads": 64, "kv_dtype": torch.bfloat16, "max_tokens": max_tokens,
        "topk_width": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 0, "sm_scale": 0.0625, "index_topk": 2048,
        "index_kpool": 4,
    }  # fmt: skip
    flashinfer = ModuleType("flashinfer.mla")
    flashinfer.BatchMLAPagedAttentionWrapper = wrapper
    parent = ModuleType("flashinfer")
    parent.mla = flashinfer
    gb10 = SimpleNamespace(multi_processor_count=48)
    with (
        mock.patch.dict(sys.modules, {"flashinfer": parent, "flashinfer.mla": flashinfer}),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: gb10),
    ):
        try:
            module._SM90State(**{name: value for name, value in sizes.items() if name in parameters})
        except Exception as error:
            return {"error": type(error).__name__, "said": str(error)}
        asked["restored"] = flashinfer.BatchMLAPagedAttentionWrapper is wrapper
    return asked


def validated(common: ModuleType, kv_dtype: torch.dtype, capability: tuple[int, int], per_block: int) -> str | None:
    """FlashInfer's real check of a plan, for a device that is described; the name of what it raises."""
    index = torch.zeros(3, dtype=torch.int32)
    fp8 = kv_dtype == torch.float8_e4m3fn
    limits = {"_get_fa_shared_memory_limits": lambda device: (102_400, per_block)}
    with mock.patch.multiple(
        common,
        get_compute_capability=lambda device: capability,
        **(limits if hasattr(common, "_get_fa_shared_memory_limits") else {}),
    ):
        try:
            common._validate_generated_fa_plan(
                backend="fa2", device=torch.device("cpu"), qo_indptr=index, kv_indptr=index, kv_indices=index,
                kv_len_arr=index[:2], head_dim_ckv=512, head_dim_kpe=0, q_data_type=torch.bfloat16,
                kv_data_type=kv_dtype, output_dtype=torch.bfloat16,
                scale_mode="kv-per-tensor" if fp8 else "default",
            )  # fmt: skip
        except Exception as error:
            return type(error).__name__
    return None


def build(common: ModuleType, kv_dtype: torch.dtype) -> dict[str, Any]:
    """FlashInfer's real build specification: its name and the folders that come before FlashInfer's headers."""
    spec = common.gen_batch_mla_module("fa2", torch.bfloat16, kv_dtype, torch.bfloat16, torch.int32, 512, 0, False)
    return {"name": spec.name, "folders": [str(folder) for folder in spec.extra_include_dirs or ()]}


def kernels(common: ModuleType) -> dict[str, Any]:
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    return {
        "bf16 12.1": validated(common, bf16, (12, 1), OPT_IN),
        "fp8 12.1": validated(common, fp8, (12, 1), OPT_IN),
        "fp8 12.1, less memory": validated(common, fp8, (12, 1), 90_000),
        "fp8 9.0": validated(common, fp8, (9, 0), 232_448),
        "fp8 8.9": validated(common, fp8, (8, 9), OPT_IN),
        "bf16 build": build(common, bf16),
        "fp8 build": build(common, fp8),
    }


def run() -> dict[str, Any]:
    os.environ.update(FLASHINFER_WORKSPACE_BASE=tempfile.mkdtemp(), FLASHINFER_CUDA_ARCH_LIST="12.1a")
    module = importlib.import_module(SM90)
    common = importlib.import_module(FA_COMMON)  # the installed FlashInfer's, whatever vLLM is in front

    def measure() -> dict[str, Any]:
        return {
            "capabilities": capabilities(getattr(module, BACKEND)),
            "state": made(module, 8),
            "too many": made(module, 16_384),
            "most": made(module, 16_384 - 48),
            "kernels": kernels(common),
        }

    answers = {"wrapped": measure()}
    header = Path(answers["wrapped"]["kernels"]["fp8 build"]["folders"][0]) / "flashinfer/attention/mla.cuh"
    env = importlib.import_module("flashinfer.jit.env")
    stock = (env.FLASHINFER_INCLUDE_DIR / "flashinfer/attention/mla.cuh").read_text().splitlines()
    answers["changed lines"] = [
        [old.strip(), new.strip()]
        for old, new in zip(stock, header.read_text().splitlines(), strict=True)
        if old != new
    ]
    answers["shared bytes"] = common._generated_fa_shared_bytes("fa2", 512, 0, True, 102_400)
    with harness.without("flashinfer_fa2"):
        answers["stock"] = measure()
    return answers
