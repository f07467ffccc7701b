"""vLLM's own NVFP4 experts on a small layer against a reference: do they point the right way, and are they as long?

    python -m overlay.probe.moe --out FILE [--plant inverted]     `python -m overlay probe moe` runs and reads it

A repeated token is what a model says whose experts are scaled wrongly, and no kernel fails: an inverted scale leaves a
cosine of 0.996 beside a factor of 25. So both are measured, for every backend that this GPU can run. Without a GPU, the
same layers are built up to their kernels, and the weights that a kernel would read are put together again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlay.probe import apart
from overlay.probe import experts as small
from overlay.probe.device import bf16, has_gpu
from overlay.probe.device import start as start_gpu
from overlay.probe.experts import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Experts

# Values of --moe-backend. Those that a GPU or this vLLM lacks are reported as such.
FLAGS = (
    "auto",
    "flashinfer_trtllm",
    "flashinfer_cutedsl",
    "flashinfer_cutlass",
    "flashinfer_b12x",
    "b12x",
    "cutlass",
    "marlin",
    "humming",
    "emulation",
)
# What a layer must be computable with everywhere: a failure to load or run it is a finding, not a missing backend.
REQUIRED = ("auto", "marlin", "emulation")
# Backends whose converted weights can be read back without their kernels.
READABLE = ("auto", "flashinfer_cutlass", "cutlass", "marlin", "emulation")
# Least cosine and largest deviation of the magnitude from 1. A kernel that quantises its inputs rounds them at other
# places than the reference does, and FP4 has steps of up to a third.
LIMITS_16_BIT, LIMITS_FP4 = (0.9999, 0.01), (0.99, 0.03)
CASE_S = 300.0  # a first use may compile its kernels


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the backend it is loaded for; `route_to` is the flag in force when the overlay routes it."""

    checkpoint: str
    flag: str
    route_to: str | None = None

    @property
    def asked_for(self) -> str:
        return f"{self.flag}, routed by {self.route_to}" if self.route_to else self.flag


def cases() -> list[Case]:
    """Every case; those that no GPU may fail come first, so that a backend that crashes does not take them along."""
    found = [
        *(Case("complete", flag) for flag in FLAGS),
        *(Case("one dead expert", flag) for flag in ("flashinfer_cutlass", "cutlass", "emulation")),
        *(Case("gate and up apart", flag) for flag in ("flashinfer_cutlass", "marlin", "emulation")),
        *(Case("weight-only", "emulation", route_to=flag) for flag in ("auto", "marlin")),
    ]
    return sorted(found, key=lambda case: case.flag not in REQUIRED)


@dataclass(frozen=True)
class Row:
    """One measurement. `ok` is None where nothing was measured because the backend is not to be had: see `reason`."""

    checkpoint: str
    flag: str
    backend: str = ""
    quantity: str = ""
    cosine: float | None = None
    magnitude: float | None = None
    ok: bool | None = None
    reason: str = ""


class Unavailable(Exception):
    """vLLM does not give this backend to this layer here."""


def wanted(device: str) -> list[Case]:
    return [case for case in cases() if device == "cuda" or case.flag in READABLE]


def rows(case: Case, device: str, inverted: bool) -> Iterator[Row]:
    """The measurements of one case, or the one row that says why there are none."""
    layer = small.make(up_apart=case.checkpoint == "gate and up apart")
    config = engine_config(case.flag)
    check = outputs if device == "cuda" else weights
    try:
        built = build(layer, case, config, device, inverted)
        backend = built.quant_method.nvfp4_backend.value
        for quantity, found, wanted, (least, deviation) in check(built, layer, config):
            cosine, length = small.cosine(found, wanted), small.magnitude(found, wanted)
            ok = cosine >= least and abs(length - 1) <= deviation
            yield Row(case.checkpoint, case.asked_for, backend, quantity, cosine, length, ok)
    except Unavailable as why:
        yield failed(case, str(why))
    except Exception as error:  # what a backend raises that vLLM selected and this machine cannot run
        if device == "cuda":
            torch.cuda.synchronize()  # raises where the GPU is lost to this process: the next case needs another one
        yield failed(case, f"{type(error).__name__}: {error}")


def failed(case: Case, reason: str) -> Row:
    """Nothing was measured: a fault where every GPU has to, and else the reason why a backend is not to be had."""
    return Row(case.checkpoint, case.asked_for, ok=False if case.flag in REQUIRED else None, reason=reason)


def start(device: str) -> None:
    if device == "cpu":
        from overlay.nvfp4 import cpu_load

        cpu_load.start()
    else:
        start_gpu()


def engine_config(flag: str) -> Any:
    from vllm.config import VllmConfig
    from vllm.config.kernel import KernelConfig

    return VllmConfig(kernel_config=KernelConfig(moe_backend=flag))


def build(layer: Experts, case: Case, config: Any, device: str, inverted: bool) -> torch.nn.Module:
    """vLLM's routed experts with the case's checkpoint, loaded and converted. Raises Unavailable."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    quantization = ModelOptNvFp4Config("NVFP4", True)
    with set_current_vllm_config(config), torch.device(device), bf16():
        try:
            runner = FusedMoEFactory(
                EXPERTS,
                TOP_K,
                HIDDEN,
                INTERMEDIATE,
                params_dtype=torch.bfloat16,
                renormalize=True,
                quant_config=quantization,
                prefix="model.layers.0.mlp.experts",
            )
        except (ValueError, NotImplementedError, ImportError) as why:
            raise Unavailable(str(why)) from why
        routed = runner.routed_experts
        list(routed.load_weights(small.checkpoint(layer, input_scales_of(case), inverted).items()))
        if case.route_to is not None:  # what a user's flag would have refused is left to vLLM's own choice
            routed.quant_method.moe.moe_backend = case.route_to
        routed.quant_method.process_weights_after_loading(routed)
    return routed


def input_scales_of(case: Case) -> Callable[[int], bool]:
    """Which experts of the case's checkpoint come with input scales."""
    if case.checkpoint == "weight-only":
        return lambda expert: False
    return lambda expert: case.checkpoint != "one dead expert" or expert != small.DEAD


Measured = Iterator[tuple[str, torch.Tensor, torch.Tensor, tuple[float, float]]]


def outputs(built: torch.nn.Module, layer: Experts, config: Any) -> Measured:
    """The kernel's output for all tokens, and what it should be."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    tokens, logits = layer.tokens.cuda(), layer.logits.cuda()
    with torch.inference_mode(), set_current_vllm_config(config), set_forward_context(None, config, len(tokens)):
        if built.quant_method.is_monolithic:
            found = built.forward_monolithic(tokens, logits.bfloat16())
        else:
            weights, ids = layer.routes
            kind = built.quant_method.topk_indices_dtype or torch.int32
            found = built.forward_modular(tokens, weights.cuda(), ids.cuda().to(kind))
    torch.cuda.synchronize()
    quantises = reads_fp4(built.quant_method)
    limits = LIMITS_FP4 if quantises else LIMITS_16_BIT
    yield "output", found.double().cpu(), small.reference(layer, quantises), limits


def reads_fp4(method: Any) -> bool:
    """Does the layer's kernel round its inputs to FP4? (FlashInfer's b12x does, of a W4A16 layer too.)"""
    from overlay.nvfp4.experts import computes_w4a16

    return not computes_w4a16(method)


def weights(built: torch.nn.Module, layer: Experts, config: Any) -> Measured:
    """The weights as the kernel would read them, of codes, block scales and alphas; and what inputs are divided by."""
    method = built.quant_method
    quant, backend = method.moe_quant_config, method.nvfp4_backend.value
    wanted = {
        "w13": [torch.cat([layer.weight(e, n) for n in ("gate_proj", "up_proj")]) for e in range(EXPERTS)],
        "w2": [layer.weight(e, "down_proj") for e in range(EXPERTS)],
    }
    scales = {"w13": (quant.g1_alphas, quant.a1_gscale), "w2": (quant.g2_alphas, quant.a2_gscale)}
    for name, (alphas, global_scales) in scales.items():
        codes, blocks = getattr(built, f"{name}_weight").data, getattr(built, f"{name}_weight_scale").data
        if backend in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS"):
            blocks = unswizzled(blocks, codes.shape[1], codes.shape[2] // 8)
            factors = alphas * global_scales  # an alpha is the weight's scale times the input's
        else:
            factors = alphas
        read = [dequantise_rows(codes[expert], blocks[expert], factors[expert].item()) for expert in range(EXPERTS)]
        if backend == "FLASHINFER_CUTLASS" and name == "w13":  # its kernel wants up before gate
            read = [torch.cat(weight.chunk(2)[::-1]) for weight in read]
        yield f"{name} weights", torch.stack(read), torch.stack(wanted[name]), LIMITS_16_BIT
        if global_scales is not None:
            divided_by = 1.0 / global_scales.double().flatten()
            expected = torch.full_like(divided_by, layer.input_scales[name])
            yield f"{name} input scale", divided_by, expected, LIMITS_16_BIT


def dequantise_rows(codes: torch.Tensor, blocks: torch.Tensor, factor: float) -> torch.Tensor:
    from overlay.checkpoint.tiny_nvfp4 import Packed, dequantise

    # the factor is kept out of dequantise, which rounds to bf16 and is exact only with powers of two
    return dequantise(Packed(codes, blocks, 1.0)).double() * factor


def unswizzled(blocks: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales from the order of CUTLASS's tensor cores, [experts, rows, columns] padded to 128 x 4, to rows."""
    count, padded_rows, padded_columns = blocks.shape
    tiles = blocks.view(torch.uint8).reshape(count, padded_rows // 128, padded_columns // 4, 32, 4, 4)
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(count, padded_rows, padded_columns)
    return plain[:, :rows, :columns].contiguous().view(torch.float8_e4m3fn)


def main() -> None:
    """Measure every case; on a GPU in a process apart, which measures from case `--first` on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plant", choices=("inverted",))
    parser.add_argument("--first", type=int)
    options = parser.parse_args()
    device = "cuda" if has_gpu() else "cpu"
    todo = wanted(device)
    if device == "cuda" and options.first is None:
        command = [sys.executable, "-m", "overlay.probe.moe", *sys.argv[1:]]
        apart.run(command, options.out, len(todo), CASE_S, lambda case, reason: asdict(failed(todo[case], reason)))
        return
    start(device)
    with options.out.open("a") as out:
        for number, case in enumerate(todo[options.first or 0 :], options.first or 0):
            apart.begin(options.out, number)
            for row in rows(case, device, options.plant == "inverted"):
                print(json.dumps(asdict(row)), file=out, flush=True)


if __name__ == "__main__":
    main()
