"""Loads a checkpoint on the CPU as vLLM would for a GPU, and says what its experts would multiply by.

    python -m overlay.nvfp4.cpu_load CHECKPOINT      in an environment of overlay.rehearsal.driver; prints JSON

Everything is vLLM's own, from the checkpoint's files to kernels ready to run: its configuration, its safetensors loader
and `process_weights_after_loading`. What cannot run without a GPU is left out: Marlin's repacking hands on what it is
given, so a layer that uses Marlin is complete up to there. Nothing is computed.
"""

import gc
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def start() -> None:
    """Set this process up as one worker of one GPU, whose memory is the CPU's."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.platforms import current_platform

    # models put buffers on the platform's device and make a side stream; swizzle_blockscale calls .cuda()
    type(current_platform).device_type = "cpu"
    torch.cuda.Stream = type("NoStream", (), {})
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    oracle.prepare_nvfp4_moe_layer_for_marlin = without_repacking
    MarlinNvFp4LinearKernel.process_weights_after_loading = lambda self, layer: None


def without_repacking(layer, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, is_act_and_mul):
    return w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2


def engine_config(folder: Path, load_format: str = "auto", moe_backend: str = "auto", ranks: int = 1, **model: Any):
    """vLLM's configuration for the checkpoint in `folder`, with the experts on `ranks`; `model` is for ModelConfig."""
    from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.kernel import KernelConfig

    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **model),
        load_config=LoadConfig(device="cpu", load_format=load_format),
        kernel_config=KernelConfig(moe_backend=moe_backend),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, enable_expert_parallel=ranks > 1),
    )


def load(folder: Path, **changes: Any) -> tuple[torch.nn.Module, Any]:
    """The model as `vllm serve` would load it, and its configuration; `changes` as for `engine_config`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader import get_model

    config = engine_config(folder, **changes)
    ranks = config.parallel_config.tensor_parallel_size
    # one process stands for the first of several ranks: nothing that loading does needs the others
    with set_current_vllm_config(config), mock.patch.object(get_tp_group(), "world_size", ranks):
        model = get_model(vllm_config=config)
    gc.freeze()  # vLLM collects garbage twice for each model, which costs a second once its modules are there
    return model, config


def experts(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """By module name: backend, and the numbers that a layer of routed experts multiplies by, per expert.

    `g1_alphas` and `g2_alphas` are what the accumulators of gate/up and down are multiplied by, `a1_gscale` and
    `a2_gscale` what their inputs are before they are rounded to FP4; None where inputs stay 16-bit.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    return {name: describe(layer) for name, layer in layers.items()}


def describe(layer: torch.nn.Module) -> dict[str, Any]:
    method = layer.quant_method
    quant = getattr(method, "moe_quant_config", None)
    if not hasattr(method, "nvfp4_backend") or quant is None:
        return {"method": type(method).__name__}
    return {
        "method": type(method).__name__,
        "backend": method.nvfp4_backend.value,
        "experts": type(method.moe_kernel.fused_experts).__name__,
        "w4a16": bool(getattr(method, "use_a16", False)),
        **{name: numbers(getattr(quant, name)) for name in ("g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale")},
    }


def numbers(tensor: torch.Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.detach().float().flatten().tolist()


class Lines(logging.Handler):
    """Keeps a logger's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def main(checkpoint: str) -> None:
    said = Lines()
    logging.getLogger("overlay.nvfp4_moe_scales").addHandler(said)
    start()
    model, _ = load(Path(checkpoint))
    print(json.dumps({"experts": experts(model), "log": said.lines}))


if __name__ == "__main__":
    main(*sys.argv[1:])
