"""Routed experts in NVFP4: what their methods call their scales, and what is done between loading and conversion."""

import logging
from dataclasses import dataclass

import torch

from overlay.nvfp4 import promotion, scales, unloaded
from overlay.nvfp4.findings import layer_name
from overlay.nvfp4.policy import Policy
from overlay.nvfp4.settle import NO_VALUE, Subject, settle

# Kernels that take 16-bit activations: they drop the input scales, whatever was loaded.
WEIGHT_ONLY_BACKENDS = frozenset({"MARLIN", "HUMMING"})


@dataclass(frozen=True)
class ExpertFormat:
    """Names of a checkpoint format's parameters on `RoutedExperts`, each for w13 (gate and up) and for w2 (down)."""

    label: str
    inputs: tuple[str, str]
    globals: tuple[str, str]
    blocks: tuple[str, str]
    reciprocal: bool = False


_BLOCKS = ("w13_weight_scale", "w2_weight_scale")
MODELOPT = ExpertFormat(
    "ModelOpt", ("w13_input_scale", "w2_input_scale"), ("w13_weight_scale_2", "w2_weight_scale_2"), _BLOCKS
)
QUARK = ExpertFormat(
    "Quark", ("w13_input_scale_2", "w2_input_scale_2"), ("w13_weight_scale_2", "w2_weight_scale_2"), _BLOCKS
)
COMPRESSED_TENSORS = ExpertFormat(
    "compressed-tensors",
    ("w13_input_global_scale", "w2_input_global_scale"),
    ("w13_weight_global_scale", "w2_weight_global_scale"),
    _BLOCKS,
    reciprocal=True,
)


def watch(layer: torch.nn.Module, form: ExpertFormat) -> None:
    """After `create_weights`: every scale is NaN until something is loaded into it."""
    unloaded.watch(layer, form.inputs + form.globals + form.blocks)


def prepare(
    method: object, layer: torch.nn.Module, form: ExpertFormat, policy: Policy, is_derived: bool = False
) -> None:
    """Before the conversion to a kernel's format, which folds the scales and forgets them: check, repair or re-route.

    `method` is the layer's quantisation method; with `is_derived` its conversion is its own: it may tell gate from up,
    and what it was built for cannot be changed. Raises ScaleError where a scale is missing that cannot be replaced, or
    where the policy is to refuse.
    """
    if not unloaded.watched(layer, form.blocks[0]):
        return
    subject = Subject(f"{form.label} experts", layer_name(layer), "experts")
    check_weight_scales(subject, layer, form)
    if not is_derived:
        reconcile_halves(subject, layer, form)
    if quantises_activations(method):
        missing = settle_input_scales(subject, method, layer, form, policy)
        if missing and is_derived:
            way_out = f"{type(method).__name__} computes with quantised activations alone; the checkpoint lacks them."
            raise subject.refuse(NO_VALUE, missing, way_out)
        if missing:
            route(subject, method, missing)
    elif getattr(layer, promotion.PROMOTED, False):
        cure = f"W4A16 ({method.nvfp4_backend.value}) from the start"
        subject.note("activations are not quantised", "config_groups", cure, level=logging.INFO)


def prepare_dequantization(layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Before online requantisation reads the weights back: it needs their scales and no others. Raises ScaleError."""
    if unloaded.watched(layer, form.blocks[0]):
        check_weight_scales(Subject(f"{form.label} experts", layer_name(layer), "experts"), layer, form)


def check_weight_scales(subject: Subject, layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Refuse weight scales that were not loaded: they cannot be reconstructed."""
    for name in form.globals:
        spread(subject, layer, name)
        if bad := scales.unusable_weight_scales(getattr(layer, name), form.reciprocal):
            raise subject.refuse(NO_VALUE, name, NO_WEIGHT_SCALE, bad)
    for name in form.blocks:
        blocks = getattr(layer, name).data
        whole, partly = scales.unloaded_blocks(blocks)
        if whole or (partly and not is_padded(layer)):
            raise subject.refuse("values that were never loaded", name, NO_WEIGHT_SCALE, tuple(sorted(whole + partly)))
        if partly:
            scales.zero_unloaded_blocks(blocks)


def reconcile_halves(subject: Subject, layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Give gate and up one global scale: vLLM hands the kernels gate's for both."""
    values, blocks = getattr(layer, form.globals[0]).data, getattr(layer, form.blocks[0]).data
    if values.ndim == 2 and values.shape[1] == 2:
        half = blocks.shape[1] // 2
        if changed := scales.reconcile(values, blocks, (half, half), form.reciprocal):
            cure = "brought to the larger one, block scales rescaled"
            subject.note("gate and up differ by more than 1.1", form.globals[0], cure, changed)


NO_WEIGHT_SCALE = (
    "A weight scale cannot be reconstructed: the checkpoint is incomplete, or stores these weights unquantised under "
    "names that its exclusion list does not match (vLLM matches fused module names)."
)


def spread(subject: Subject, layer: torch.nn.Module, name: str) -> None:
    """Give a fused gate_up's single scale to both halves."""
    parameter = getattr(layer, name)
    if parameter.ndim == 2 and (values := scales.spread_fused(parameter.data)) is not None:
        parameter.data.copy_(values)
        subject.note("one value for gate and up", name, "used for both", level=logging.INFO)


def settle_input_scales(
    subject: Subject, method: object, layer: torch.nn.Module, form: ExpertFormat, policy: Policy
) -> str:
    """Apply the policy to the input scales of a layer whose kernel consumes them.

    Returns what is missing where the layer has to be routed, else "".
    """
    readings = {}
    for name in form.inputs:
        spread(subject, layer, name)
        values = getattr(layer, name).data
        readings[name] = scales.read_input_scales(values, form.reciprocal, local_experts(layer, len(values)))
    missing = any(reading.all_bad for reading in readings.values())
    anywhere = missing_on_any_rank(missing, method.moe.moe_parallel_config)
    if all(reading.clean for reading in readings.values()) and not anywhere:
        return ""
    settlement = settle(subject, readings, policy, missing_elsewhere=anywhere and not missing)
    for name, values in settlement.values.items():
        getattr(layer, name).data.copy_(values)
    return settlement.missing if settlement.route else ""


def quantises_activations(method: object) -> bool:
    """Does the kernel that was selected for this layer read the checkpoint's input scales?"""
    if getattr(method, "use_a16", False) or getattr(method, "per_token_activation", False):
        return False
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    backend = method.nvfp4_backend
    forced = getattr(oracle, "_use_a16", None)  # b12x can be told to run as W4A16; since 0.32
    return backend.name not in WEIGHT_ONLY_BACKENDS and not (forced and forced(backend, False))


def is_padded(layer: torch.nn.Module) -> bool:
    """Was the layer made larger than the checkpoint's projections, leaving a margin that no loader writes?"""
    config = layer.moe_config
    return any(
        getattr(config, f"{size}_unpadded", None) not in (None, getattr(config, size))
        for size in ("hidden_dim", "intermediate_size_per_partition")
    )


def local_experts(layer: torch.nn.Module, rows: int) -> torch.Tensor | None:
    """Mask over all experts of those on this rank, where a parameter of `rows` rows spans the ranks; else None."""
    expert_map = getattr(layer, "_expert_map", None)  # global expert -> local slot, or -1
    return expert_map >= 0 if expert_map is not None and len(expert_map) == rows else None


def missing_on_any_rank(missing: bool, parallel: object) -> bool:
    """Ranks that exchange activations must agree on their format: one that has to route takes the others along.

    A collective, reached by every rank of the layer or by none: the backend was selected alike on all of them.
    """
    if not parallel.use_all2all_kernels:
        return missing
    from vllm.distributed.parallel_state import get_ep_group

    flag = torch.tensor([int(missing)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=get_ep_group().cpu_group)
    return bool(flag.item())


def route(subject: Subject, method: object, parameters: str) -> None:
    """Select the layer's backend again without activation quantisation, as vLLM does for a W4A16 checkpoint.

    `parameters` names the input scales that are missing.
    """
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    before = method.nvfp4_backend.value
    if getattr(method, "moe_kernel", None) is not None:
        raise subject.refuse_to_change(parameters, before)
    try:
        selected = oracle.select_nvfp4_moe_backend(config=method.moe, weight_key=kNvfp4Static, activation_key=None)
    except (ValueError, NotImplementedError) as error:
        flag = method.moe.moe_backend
        raise subject.refuse(
            NO_VALUE,
            parameters,
            f"--moe-backend {flag} quantises activations and cannot compute without them. Leave the flag out, or use "
            f"--moe-backend marlin. vLLM says: {error}"
            if flag != "auto"
            else f"No backend of this GPU computes NVFP4 weights with 16-bit activations. vLLM says: {error}",
        ) from error
    method.nvfp4_backend, method.experts_cls = selected
    method.use_a16 = True
    if hasattr(method, "activation_quant_key"):
        method.activation_quant_key = None
    if hasattr(method, "use_global_sf"):
        method.use_global_sf = oracle.is_global_sf_supported_for_nvfp4_backend(method.nvfp4_backend)
    cure = f"routed to W4A16 ({method.nvfp4_backend.value} instead of {before})"
    subject.note(NO_VALUE, parameters, cure)


def fold_input_scales(method: object, layer: torch.nn.Module, form: ExpertFormat, global_scales: torch.Tensor) -> None:
    """After a conversion without the experts' own last step, which multiplies the input scales into the alphas.

    vLLM's Quark method does: with every backend that quantises activations in the kernel, its experts compute outputs
    that are too large by the reciprocal of the input scale (by 100, at 0.01). Emulation and weight-only kernels have
    nothing to fold. `global_scales` ``[experts]`` are gate's as loaded: alphas that equal them were not multiplied.
    """
    alphas = method.moe_quant_config.g1_alphas
    if getattr(layer, form.inputs[0], None) is None or not torch.equal(alphas, global_scales):
        return
    names = ("w13_input_scale", "w2_input_scale")
    for name, own in zip(names, form.inputs, strict=True):
        setattr(layer, name, getattr(layer, own))
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    for name in names:
        delattr(layer, name)
    if not torch.equal(alphas, global_scales):
        subject = Subject(f"{form.label} experts", layer_name(layer), "experts")
        subject.note("scales that vLLM leaves out of the alphas", " and ".join(form.inputs), "multiplied in")
