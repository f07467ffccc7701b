"""What ModelOptNvFp4FusedMoE computes with when an input scale was not loaded. CPU only: python unchecked_scales.py"""

from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
CALIBRATED = 1.5e-3  # a usual activation scale
# What the memory that torch.empty returns may hold: fresh pages, another tensor's values, or another tensor's NaN.
MEMORY = {"zero": 0.0, "1e30": 1e30, "nan": float("nan")}


def process(unloaded: set[int], memory: float):
    """The w13 activation scale that the kernel gets: every expert's input scale is loaded but those of `unloaded`."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

    method = object.__new__(ModelOptNvFp4FusedMoE)
    torch_empty = torch.empty
    method.quant_config = ModelOptNvFp4Config.from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "config_groups": {}}
    )
    method.moe = SimpleNamespace(is_act_and_mul=True)
    method.use_a16 = method.per_token_activation = False
    method.use_global_sf = True
    # The only W4A4 backend whose preparation runs on the CPU; the FlashInfer ones take the same maximum over experts.
    method.nvfp4_backend = NvFp4MoeBackend.EMULATION
    method._build_moe_kernel = lambda layer: None
    layer = torch.nn.Module()

    def dirty(*size, **options):
        made = torch_empty(*size, **options)
        return made.fill_(memory) if made.dtype == torch.float32 else made.zero_()

    loading = {"weight_loader": lambda *rest: None, "global_num_experts": EXPERTS}
    one_rank = {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    with mock.patch.object(torch, "empty", dirty), mock.patch.multiple("vllm.model_executor.parameter", **one_rank):
        method.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, **loading)
    for name in ("w13_weight_scale_2", "w2_weight_scale_2"):
        getattr(layer, name).data.fill_(1e-4)
    for name in ("w13_input_scale", "w2_input_scale"):
        for expert in set(range(EXPERTS)) - unloaded:
            getattr(layer, name).data[expert] = CALIBRATED
    method.process_weights_after_loading(layer)
    return layer.w13_input_scale.detach().flatten()[0]


def quantised(scale):
    """Root mean square of unit activations after vLLM's own NVFP4 quantise-dequantise with that scale."""
    import torch
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    return float(ref_nvfp4_quant_dequant(x, scale, 16).float().square().mean().sqrt())


def reproduce() -> dict[str, object]:
    """Case -> the root mean square of unit activations, as the experts would see them. 1 is right."""
    cases = {"every scale loaded": quantised(process(set(), 0.0))}
    for name, memory in MEMORY.items():
        cases[f"no scale loaded, memory holds {name}"] = quantised(process(set(range(EXPERTS)), memory))
        cases[f"expert 2 of 4 not loaded, memory holds {name}"] = quantised(process({2}, memory))
    wrong = [name for name, rms in cases.items() if not 0.8 < rms < 1.2]
    return {"rms": cases, "wrong": wrong}


if __name__ == "__main__":
    result = reproduce()
    print(f"vllm {version('vllm')}: root mean square of unit activations, as the experts see them")
    for name, rms in result["rms"].items():
        print(f"{rms:<10.4g}  {name}")
    print(f"{len(result['wrong'])} cases are wrong, and none was refused")
