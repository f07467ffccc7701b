"""What is asked of vLLM beside whole loads: the method that a configuration gives a layer, and single steps of one."""

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from overlay.nvfp4.cpu_load import Lines, engine_config, load, numbers
from tests import installed
from tests.nvfp4.checkpoints import FORMATS, GEOMETRY, INTERMEDIATE, tensors, write
from tests.nvfp4.runner import attempt, describe, poisoned
from tests.nvfp4.scenarios import (
    DATA,
    MODELOPT,
    QUANTIZATION,
    complete,
    dead_expert,
    scaled,
    without,
    without_experts_input_scales,
)

# Public checkpoint -> layers to ask for, as (kind, prefix).
PUBLIC = {
    "mo-flat-glm52": [
        ("experts", "model.layers.3.mlp.experts"),
        ("experts", "model.layers.10.mlp.experts"),  # "model.layers.1.*" is excluded and must not reach it
        ("linear", "model.layers.10.self_attn.q_a_proj"),
        ("linear", "model.layers.0.mlp.down_proj"),
    ],
    "mo-nested-glm5": [("experts", "model.layers.3.mlp.experts"), ("experts", "model.layers.78.mlp.experts")],
    "mo-flat-minimax-m27": [
        ("experts", "model.layers.0.block_sparse_moe.experts"),
        ("linear", "model.layers.0.block_sparse_moe.gate"),
    ],
    "mo-stub-nemotron3-super": [("experts", "model.layers.0.mlp.experts")],
    "mix-flat-qwen36-35b": [
        ("experts", "language_model.model.layers.0.mlp.experts"),
        ("linear", "language_model.model.layers.0.linear_attn.out_proj"),
        ("linear", "language_model.model.layers.7.mlp.gate"),  # not listed
    ],
    "mix-nested-qwen36-35b": [
        ("experts", "language_model.model.layers.39.mlp.experts"),
        ("linear", "language_model.model.layers.0.mlp.shared_expert.down_proj"),
    ],
    "neg-int4-kimi-k25": [("experts", "model.layers.1.mlp.experts"), ("linear", "model.layers.1.self_attn.o_proj")],
    "ct-w4a4-devstral2-autoround": [
        ("linear", "model.layers.0.self_attn.o_proj"),
        ("experts", "model.layers.0.experts"),
    ],
    "ct-mix-w4a16-qwen38-35b-distill": [
        ("experts", "model.layers.0.mlp.experts"),
        ("linear", "model.layers.0.mlp.shared_expert.down_proj"),
        ("linear", "model.layers.0.self_attn.o_proj"),
        ("linear", "mtp.layers.0.self_attn.o_proj"),
    ],
    "mo-weightonly-glm53flash-libertai": [
        ("experts", "model.layers.0.mlp.experts"),
        ("linear", "model.layers.0.self_attn.o_proj"),
    ],
    "mo-nested-minimax-m21-gadflyii": [("experts", "model.layers.0.block_sparse_moe.experts")],
    "mix-nested-step35-flash-w8a8sq": [
        ("experts", "model.layers.3.moe.experts"),
        ("linear", "model.layers.0.mlp.down_proj"),
        ("linear", "model.layers.0.mlp.gate_up_proj"),
        ("linear", "model.layers.9.mlp.down_proj"),  # not listed
        ("linear", ""),  # vLLM builds some layers without a name
    ],
    "quark-nvfp4-fixture": [("experts", "model.layers.0.mlp.experts"), ("linear", "model.layers.0.mlp.down_proj")],
}


# Checkpoints of `python -m overlay tiny --quant`, as (case, fault). The tests write them, once for both processes.
TINY = (("genuine_w4a4", "fused_gate_up"), ("mixed_precision_unknown", None))


def everything(base: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every check by name; each returns what `attempt` returns."""
    found = {
        f"public/{name}/{kind} {prefix}": functools.partial(
            attempt, functools.partial(classify, base, name, kind, prefix)
        )
        for name, layers in PUBLIC.items()
        for kind, prefix in layers
    }
    steps = {
        f"public/{name}/asked for": functools.partial(public_config, base, name, quantization="modelopt_fp4")
        for name in ("mo-stub-nemotron3-super", "mo-nested-minimax-m21-gadflyii")
    } | {
        "nameless": nameless_layer,
        "mixed/shared expert alone": shared_expert_alone,
        "requantise": lambda: requantise(base, complete),
        "requantise without a scale": lambda: requantise(base, without("globals", "experts.1.down")),
        "preprocessed": lambda: preprocessed(base),
        "derived/complete": lambda: derived_method(base, complete),
        "derived/dead": lambda: derived_method(base, dead_expert),
        "derived/none": lambda: derived_method(base, without_experts_input_scales),
        "derived/mismatch": lambda: derived_method(base, scaled("globals", 4.0, "experts.1.up")),
        "net": lambda: unknown_way(base),
        "marlin": marlin_line,
        **{f"fused/{form}": functools.partial(fused_scales, form) for form in FORMATS},
        "probe": lambda: probe(inverted=False),
        "probe planted": lambda: probe(inverted=True),
    }
    if "TINY_CHECKPOINTS" in os.environ:
        tiny = Path(os.environ["TINY_CHECKPOINTS"])
        steps |= {f"tiny/{case}": functools.partial(tiny_checkpoint, tiny / case) for case, _ in TINY}
    return {**found, **{name: functools.partial(attempt, what) for name, what in steps.items()}}


def classify(base: Path, name: str, kind: str, prefix: str) -> dict[str, Any]:
    """The method that a public checkpoint's configuration gives one layer, by way of vLLM's `ModelConfig`."""
    from vllm.config import set_current_vllm_config

    config = public_config(base, name)
    if config.quant_config is None:
        return {"config": None}
    # vLLM tells a configuration the model's fused modules before it builds the model
    config.quant_config.packed_modules_mapping = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    }
    with set_current_vllm_config(config):
        layer = layer_of(kind, prefix)
        method = config.quant_config.get_quant_method(layer, prefix)
    owner = getattr(layer, "scheme", None) or method
    spec = getattr(owner, "spec", None)
    weight_only = getattr(owner, "use_a16", False) or (spec is not None and spec.activation is None)
    if not installed.since(0, 30):  # said by the class of a linear layer, by the backend of compressed-tensors' experts
        backend = getattr(owner, "nvfp4_backend", None)
        weight_only |= "W4A16" in type(owner).__name__ or (backend is not None and backend.name == "MARLIN")
    return {"config": type(config.quant_config).__name__, "method": type(owner).__name__, "w4a16": bool(weight_only)}


def public_config(base: Path, name: str, **changes: Any):
    """vLLM's configuration for our small model with a public checkpoint's quantization."""
    case = json.loads((DATA / "public_configs" / f"{name}.json").read_text())
    content = case["config"]
    folder = base / f"public-{name}"
    if not folder.exists():
        own_file = "quantization" in content
        inner = content.get("text_config") if "quantization_config" not in content else content
        quantization = content if own_file else (inner or content).get("quantization_config", content)
        if name == "ct-mix-w4a16-qwen38-35b-distill":  # its README shows no quant_method
            quantization = {**quantization, "quant_method": "compressed-tensors"}
        if name == "quark-nvfp4-fixture":  # vLLM's loader wants what its unit test does not need
            quantization = {**quantization, "export": {"kv_cache_group": [], "pack_method": "reorder"}}
        write(folder, quantization, own_file, {"model.norm.weight": torch.ones(1)})
    return engine_config(folder, **changes)


def layer_of(kind: str, prefix: str) -> torch.nn.Module:
    """A layer of vLLM's, unquantised, to ask a configuration about."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.linear import ReplicatedLinear

    if kind == "linear":
        return ReplicatedLinear(GEOMETRY["hidden_size"], GEOMETRY["hidden_size"], bias=False, prefix=prefix)
    return FusedMoEFactory(4, 2, GEOMETRY["hidden_size"], INTERMEDIATE, prefix=prefix).routed_experts


def nameless_layer() -> dict[str, Any]:
    """A quantised layer without a prefix that misses its input scale: it is routed, and the log finds words for it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    own = {"quant_method": "NVFP4", "is_checkpoint_nvfp4_serialized": True}
    kernels = mock.MagicMock(linear_backend="auto", linear_backend_per_quant=None)
    load_config = mock.MagicMock(load_format="auto")
    with set_current_vllm_config(mock.MagicMock(load_config=load_config, kernel_config=kernels)), poisoned(0.0):
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=ModelOptNvFp4Config(**own), prefix="")
    layer.weight_scale.data.fill_(1.0)
    layer.weight_scale_2.data.fill_(0.02)
    layer.quant_method.process_weights_after_loading(layer)
    return {"kernel": type(layer.quant_method.kernel).__name__}


def shared_expert_alone() -> dict[str, Any]:
    """Routed experts without an entry beside a shared one with an algorithm of linear layers; and with entries."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    listed = {
        "shared": "model.layers.0.mlp.shared_expert.up_proj",
        "own": "model.layers.0.mlp.experts.0.up_proj",
        "beside": "model.layers.0.mlp.up_proj",
    }
    found = {}
    for name, entry in listed.items():
        layers = {entry: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
        content = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
        with set_current_vllm_config(VllmConfig()):
            config = ModelOptMixedPrecisionConfig.from_config({**content, "quantized_layers": layers})
            layer = layer_of("experts", "model.layers.0.mlp.experts")
            try:
                method = config.get_quant_method(layer, "model.layers.0.mlp.experts")
                found[name] = type(method).__name__
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def fused_scales(form: str) -> dict[str, Any]:
    """Where vLLM's loader writes the scales of projections that a checkpoint stores fused, by kind of scale."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    content, stored, found = QUANTIZATION[form], FORMATS[form], {}
    method = {"modelopt": "modelopt_fp4"}.get(form, form)
    with set_current_vllm_config(VllmConfig()):
        config = get_quantization_config(method).from_config(content)
        config.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        common = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
        layers = {
            "qkv_proj": QKVParallelLinear(256, 64, 4, 2, prefix="model.layers.0.self_attn.qkv_proj", **common),
            "gate_up_proj": MergedColumnParallelLinear(
                256, [64, 64], prefix="model.layers.0.mlp.gate_up_proj", **common
            ),
        }
    for kind, layer in layers.items():
        for scale in ("globals", "input"):
            parameter = getattr(layer, getattr(stored, scale))
            parameter.data.fill_(torch.nan)
            parameter.weight_loader(parameter, torch.tensor(0.25))
            found.setdefault(kind, {})[scale] = numbers(parameter.data)
    return found


def experts_before_processing(base: Path, name: str, edit: Callable) -> torch.nn.Module:
    """Experts of a model whose weights are loaded and not yet converted."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    folder = write(base / name, MODELOPT, False, tensors(FORMATS["modelopt"], edit(FORMATS["modelopt"])))
    with poisoned(1e30), mock.patch("vllm.model_executor.model_loader.base_loader.process_weights_after_loading"):
        model, _ = load(folder)
    return next(module for module in model.modules() if isinstance(module, RoutedExperts))


def requantise(base: Path, edit: Callable) -> dict[str, Any]:
    """What online quantisation reads a checkpoint's experts as."""
    layer = experts_before_processing(base, f"requantise-{edit.__name__}", edit)
    w13, w2 = layer.quant_method.dequantize_weight(layer)
    return {"largest": max(w13.abs().max().item(), w2.abs().max().item())}


def preprocessed(base: Path) -> dict[str, Any]:
    """Weights in a kernel's format, from vLLM's cache, into a layer whose checkpoint has no input scales."""
    from vllm.model_executor.utils import weights_already_processed

    layer = experts_before_processing(base, "preprocessed", without("input", "experts"))
    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)
    return {}


def derived_method(base: Path, edit: Callable) -> dict[str, Any]:
    """The scales that a method sees which derives from vLLM's and processes weights itself, as Muse Spark's does."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

    seen = []

    class OwnModelOptMethod(ModelOptNvFp4FusedMoE):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scales = (layer.w13_input_scale, layer.w2_input_scale, layer.w13_weight_scale_2)
            seen.append([numbers(scale.data) for scale in scales])

    folder = base / f"derived-{len(list(base.iterdir()))}"
    write(folder, MODELOPT, False, tensors(FORMATS["modelopt"], edit(FORMATS["modelopt"])))
    with poisoned(1e30), mock.patch.object(ModelOptNvFp4Config, "FusedMoEMethodCls", OwnModelOptMethod):
        load(folder)
    return {"scales": seen}


def unknown_way(base: Path) -> dict[str, Any]:
    """A layer whose missing input scales nobody settles, as if there were a way to its kernel that we do not know."""
    folder = write(
        base / "net", MODELOPT, False, tensors(FORMATS["modelopt"], without("input", "experts")(FORMATS["modelopt"]))
    )
    with poisoned(1e30), mock.patch("overlay.nvfp4.experts.settle_input_scales", return_value=""):
        model, _ = load(folder)
    return describe(model)


def marlin_line() -> dict[str, Any]:
    """What vLLM logs when it converts experts for Marlin; the conversion itself cannot run here."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    log, logger = Lines(), logging.getLogger(marlin_utils_fp4.__name__)
    logger.addHandler(log)
    try:
        marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(*[mock.MagicMock()] * 8)
    except Exception as cannot_go_on:
        reason = type(cannot_go_on).__name__
    finally:
        logger.removeHandler(log)
    return {"said": log.lines, "stopped": reason}


def probe(inverted: bool) -> dict[str, Any]:
    """What `python -m overlay probe moe` measures without a GPU, in this process; planted, of two backends."""
    from overlay.probe import moe

    flags = ("cutlass", "marlin") if inverted else moe.READABLE
    wanted = [case for case in moe.cases() if case.flag in flags]
    return {"rows": [asdict(row) for case in wanted for row in moe.rows(case, "cpu", inverted)]}


def tiny_checkpoint(folder: Path) -> dict[str, Any]:
    """A tiny glm5_next checkpoint, loaded into GLM's own model class."""
    with poisoned(1e30):
        model, _ = load(folder)
    return describe(model)
