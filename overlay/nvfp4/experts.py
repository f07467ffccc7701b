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
# Kernels that quantise activations with scales of their own, computed from each block: nothing that was loaded is read.
DYNAMIC_BACKENDS = frozenset({"FLASHINFER_B12X", "FLASHINFER_MOE_EP_CUTEDSL"})


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


def watch(layer: torch.nn.Module, form: ExpertFormat, is_dummy: bool) -> None:
    """After `create_weights`: every scale is NaN until something is loaded into it; for `is_dummy` see `unloaded`."""
    unloaded.watch(layer, form.inputs + form.globals + form.blocks, is_dummy)


def prepare(
    method: object, layer: torch.nn.Module, form: ExpertFormat, policy: Policy, is_derived: bool = False
) -> bool:
    """Before the conversion to a kernel's format, which folds the scales and forgets them: check, repair or re-route.

    `method` is the layer's quantisation method; with `is_derived` its conversion is its own: it may tell gate from up,
    and what it was built for cannot be changed. Returns whether the layer's scales are known to be somebody's, so that
    `verify` can follow. Raises ScaleError where a scale is missing that cannot be replaced, or where the policy is to
    refuse.
    """
    if not unloaded.watched(layer, form.blocks[0]):
        return False
    subject = Subject(f"{form.label} experts", layer_name(layer), "experts")
    check_weight_scales(subject, layer, form)
    if not is_derived:
        reconcile_halves(subject, layer, form)
    if reads_no_input_scale(method):
        say_unread(subject, method, layer, form)
    elif not computes_w4a16(method):
        missing = settle_input_scales(subject, method, layer, form, policy)
        if missing and is_derived:
            way_out = f"{type(method).__name__} computes with quantised activations alone; the checkpoint lacks them."
            raise subject.refuse(NO_VALUE, missing, way_out)
        if missing:
            route(subject, method, missing)
    elif getattr(layer, promotion.PROMOTED, False):
        cure = f"W4A16 ({method.nvfp4_backend.value}) from the start"
        subject.note("activations are not quantised", "config_groups", cure, level=logging.INFO)
    return True


def prepare_dequantization(layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Before online requantisation reads the weights back: it needs their scales and no others. Raises ScaleError."""
    if unloaded.watched(layer, form.blocks[0]):
        check_weight_scales(Subject(f"{form.label} experts", layer_name(layer), "experts"), layer, form)


def check_weight_scales(subject: Subject, layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Refuse weight scales that were not loaded: they cannot be reconstructed."""
    for name in form.globals:
        take_gates_for_both(subject, layer, name)
        if bad := scales.unusable_weight_scales(getattr(layer, name), form.reciprocal):
            raise subject.refuse(NO_VALUE, name, NO_WEIGHT_SCALE, bad)
    for name in form.blocks:
        blocks = getattr(layer, name).data
        margin = padding(layer, form, name)
        whole, partly = scales.unloaded_blocks(blocks, margin)
        if whole or partly:
            raise subject.refuse("values that were never loaded", name, NO_WEIGHT_SCALE, tuple(sorted(whole + partly)))
        if margin is not None:
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


def take_gates_for_both(subject: Subject, layer: torch.nn.Module, name: str) -> None:
    """Where no expert has a global scale for up, gate's is up's as well: vLLM itself computes both with gate's.

    So is a gate_up stored that has one scale, under gate's name. Said aloud, because a checkpoint that lost every up's
    looks the same. Up's alone is a loss in any case: nothing stores it so, and vLLM would not read it.
    """
    parameter = getattr(layer, name)
    if parameter.ndim == 2 and (values := scales.gates_for_both(parameter.data)) is not None:
        parameter.data.copy_(values)
        subject.note("one value for gate and up", name, "gate's used for both, as vLLM does")


def settle_input_scales(
    subject: Subject, method: object, layer: torch.nn.Module, form: ExpertFormat, policy: Policy
) -> str:
    """Apply the policy to the input scales of a layer whose kernel consumes them.

    Returns what is missing where the layer has to be routed, else "".
    """
    readings = {}
    for name in form.inputs:
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


def computes_w4a16(method: object) -> bool:
    """Does the kernel that was selected for this layer take 16-bit activations?"""
    backend = method.nvfp4_backend
    if backend.name in WEIGHT_ONLY_BACKENDS | DYNAMIC_BACKENDS:
        return backend.name in WEIGHT_ONLY_BACKENDS
    if getattr(method, "use_a16", False) or backend.name != "B12X":
        return getattr(method, "use_a16", False)
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    return oracle._use_a16(backend, False)  # since 0.30, as b12x is; VLLM_B12X_MOE_FP4_FORCE_A16 asks for it


def reads_no_input_scale(method: object) -> bool:
    """Does the layer's kernel quantise activations without a look at the checkpoint's input scales?"""
    return method.nvfp4_backend.name in DYNAMIC_BACKENDS or getattr(method, "per_token_activation", False)


def say_unread(subject: Subject, method: object, layer: torch.nn.Module, form: ExpertFormat) -> None:
    """Input scales that are missing are no fault of a layer that does not read them."""
    readings = {name: scales.read_input_scales(getattr(layer, name).data, form.reciprocal) for name in form.inputs}
    if missing := [name for name, reading in readings.items() if reading.all_bad]:
        cure = f"not read: {method.nvfp4_backend.value} quantises activations with scales of its own"
        subject.note(NO_VALUE, " and ".join(missing), cure, level=logging.INFO)


def padding(layer: torch.nn.Module, form: ExpertFormat, name: str) -> torch.Tensor | None:
    """Mask ``[out, in / 16]`` of the block scales `name` that no loader writes, or None where there are none.

    A layer may be larger than the checkpoint's projections: vLLM loads each into the start of its part.
    """
    config, shape = layer.moe_config, getattr(layer, name).shape[1:]
    hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    if name == form.blocks[0]:
        gate_and_up = getattr(layer, form.globals[0])
        return scales.margin(shape, gate_and_up.shape[1] if gate_and_up.ndim == 2 else 1, inner, hidden)
    return scales.margin(shape, 1, hidden, inner)


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
    flag, backend = method.moe.moe_backend, selected[0]
    # other backends select W4A16 by what the method says of itself, at its conversion; Quark's has no words for it
    if backend.name not in WEIGHT_ONLY_BACKENDS and not hasattr(method, "use_a16"):
        raise subject.refuse(
            NO_VALUE,
            parameters,
            f"--moe-backend {flag} computes with 16-bit activations only where the layer's method tells it to, which "
            f"{type(method).__name__} of this vLLM cannot. Leave the flag out, or use --moe-backend marlin.",
        )
    method.nvfp4_backend, method.experts_cls = selected
    method.use_a16 = True
    if hasattr(method, "activation_quant_key"):
        method.activation_quant_key = None
    if hasattr(method, "use_global_sf"):
        method.use_global_sf = oracle.is_global_sf_supported_for_nvfp4_backend(method.nvfp4_backend)
    cure = f"routed to W4A16 ({method.nvfp4_backend.value} instead of {before})"
    subject.note(NO_VALUE, parameters, cure)


# What a kernel multiplies by, in vLLM's description of a converted layer.
WEIGHT_FACTORS, INPUT_FACTORS = ("g1_alphas", "g2_alphas"), ("a1_gscale", "a2_gscale")


def verify(method: object, layer: torch.nn.Module, form: ExpertFormat) -> None:
    """After the conversion of a layer that was prepared: the kernel multiplies by numbers, whichever way it went.

    The net below everything else, for ways that lead from an unloaded scale to a kernel and are not known yet. Raises
    ScaleError.
    """
    quant = getattr(method, "moe_quant_config", None)
    if quant is None:
        return
    names = WEIGHT_FACTORS if reads_no_input_scale(method) else WEIGHT_FACTORS + INPUT_FACTORS
    numbers = {name: getattr(quant, name, None) for name in names}
    bad = [name for name, values in numbers.items() if values is not None and not values.isfinite().all()]
    if bad:
        subject = Subject(f"{form.label} experts", layer_name(layer), "experts")
        way_out = (
            f"The layer would compute with {method.nvfp4_backend.value} and with scales that nobody loaded, in a way "
            "that the overlay does not know. Use --moe-backend marlin, which needs no input scales."
        )
        raise subject.refuse("numbers that are not finite after the conversion", " and ".join(bad), way_out)


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
