"""vLLM's real platform class, asked about PDL as its kernels ask, for three capabilities."""

import importlib
import os
from typing import Any
from unittest import mock

import torch

from overlay.patches.kda_pdl import CUDA
from tests.patches import harness


def ask(capability: tuple[int, int]) -> bool:
    """torch.cuda and NVML both see a GPU of `capability`."""
    importlib.import_module(CUDA)
    from vllm.platforms import current_platform

    platform = type(current_platform)
    before = os.environ["OVERLAY_REHEARSAL_CAPABILITY"]
    os.environ["OVERLAY_REHEARSAL_CAPABILITY"] = "{}.{}".format(*capability)
    platform.get_device_capability.cache_clear()
    forget = getattr(platform.is_arch_support_pdl.__func__, "cache_clear", lambda: None)  # cached from 0.33
    forget()
    try:
        with (
            mock.patch.object(torch.cuda, "current_device", lambda: 0),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
        ):
            return current_platform.is_arch_support_pdl()
    finally:
        forget()
        os.environ["OVERLAY_REHEARSAL_CAPABILITY"] = before
        platform.get_device_capability.cache_clear()


def measure() -> dict[str, bool]:
    return {"{}.{}".format(*capability): ask(capability) for capability in ((12, 1), (12, 0), (9, 0), (8, 9))}


def run() -> dict[str, Any]:
    wrapped = measure()
    with harness.without("kda_pdl"):
        return {"wrapped": wrapped, "stock": measure()}
