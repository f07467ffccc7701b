"""Linear layers in NVFP4: the same checks as for experts, per shard of a fused projection, and the way to W4A16."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from overlay.nvfp4 import scales, unloaded
from overlay.nvfp4.experts import NO_WEIGHT_SCALE
from overlay.nvfp4.findings import is_draft, layer_name
from overlay.nvfp4.policy import Policy
from overlay.nvfp4.settle import NO_VALUE, Subject, settle


@dataclass(frozen=True)
class LinearFormat:
    """Names of a checkpoint format's parameters on a linear layer."""

    label: str
    input: str
    globals: str
    blocks: str = "weight_scale"
    reciprocal: bool = False


MODELOPT = LinearFormat("ModelOpt", "input_scale", "weight_scale_2")
QUARK = LinearFormat("Quark", "input_scale_2", "weight_scale_2")
COMPRESSED_TENSORS = LinearFormat("compressed-tensors", "input_global_scale", "weight_global_scale", reciprocal=True)


def watch(layer: torch.nn.Module, form: LinearFormat, is_dummy: bool) -> None:
    """After `create_weights`: every scale of an NVFP4 layer is NaN until something is loaded into it.

    A layer without the form's global weight scale is not NVFP4 and not touched: since 0.30 one method of ModelOpt's
    serves FP8 and MXFP8 too, whose scales have the same names, other types and sentinels of vLLM's own.
    """
    if hasattr(layer, form.globals):
        unloaded.watch(layer, (form.input, form.globals, form.blocks), is_dummy)


def prepare(
    owner: object, layer: torch.nn.Module, form: LinearFormat, policy: Policy, route: Callable[[object], None]
) -> bool:
    """Before the scales are folded: check, repair, or make the layer W4A16.

    `owner` is the method or scheme that holds the layer's kernel; `route(owner)` makes it forget the input scale.
    Returns False where vLLM must not process the layer at all: a draft model's head into which nothing was loaded is
    replaced by the target's after loading. Raises ScaleError like `experts.prepare`.
    """
    if not unloaded.watched(layer, form.blocks):
        if unloaded.is_marked(layer, form.blocks):  # dummy weights, for which the kernel is built all the same
            setattr(layer, PROCESSED, True)
        return True
    subject = Subject(f"{form.label} linear", layer_name(layer), "shards")
    if nothing_loaded(layer, form):
        if is_draft() and is_head(layer):
            cure = "left alone: vLLM puts the target model's head in its place"
            subject.note("nothing was loaded", form.blocks, cure, level=logging.INFO)
            return False
        raise subject.refuse("nothing was loaded", form.blocks, NO_WEIGHT_SCALE)
    check_weight_scales(subject, layer, form)
    if is_routed(owner):
        delattr(layer, form.input)  # a reload brings it back
    elif hasattr(layer, form.input) and quantises_activations(owner):
        settle_input_scale(subject, owner, layer, form, policy, route)
    setattr(layer, PROCESSED, True)
    return True


def nothing_loaded(layer: torch.nn.Module, form: LinearFormat) -> bool:
    blocks = getattr(layer, form.blocks).data
    return bool(getattr(layer, form.globals).isnan().all()) and len(scales.unloaded_blocks(blocks)[0]) == len(blocks)


def is_head(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def check_weight_scales(subject: Subject, layer: torch.nn.Module, form: LinearFormat) -> None:
    """Refuse what was not loaded; give the shards of a fused projection one global scale: the kernels take only one.

    Every shard has to have one: of a projection that is stored fused, vLLM's loader writes the one scale to all.
    """
    values, blocks = getattr(layer, form.globals).data, getattr(layer, form.blocks).data
    if bad := scales.unusable_weight_scales(values, form.reciprocal):
        raise subject.refuse(NO_VALUE, form.globals, NO_WEIGHT_SCALE, bad)
    if any(scales.unloaded_blocks(blocks)):
        raise subject.refuse("values that were never loaded", form.blocks, NO_WEIGHT_SCALE)
    if scales.reconcile(values[None], blocks[None], layer.logical_widths, form.reciprocal):
        cure = "brought to the largest one, block scales rescaled"
        subject.note("shards differ by more than 1.1", form.globals, cure)


def settle_input_scale(
    subject: Subject,
    owner: object,
    layer: torch.nn.Module,
    form: LinearFormat,
    policy: Policy,
    route: Callable[[object], None],
) -> None:
    """Apply the policy to the input scale of a layer whose kernel consumes it."""
    values = getattr(layer, form.input).data
    reading = scales.read_input_scales(values, form.reciprocal)
    if reading.clean:
        return
    settlement = settle(subject, {form.input: reading}, policy, missing_elsewhere=False)
    for repaired in settlement.values.values():
        values.copy_(repaired)
    if settlement.route:
        before = type(owner.kernel).__name__
        if getattr(layer, PROCESSED, False):
            raise subject.refuse_to_change(form.input, before)
        owner.kernel = weight_only_kernel(subject, form)
        setattr(owner, ROUTED, True)
        route(owner)
        delattr(layer, form.input)
        offer_plain_input(layer, owner.kernel)
        now = type(owner.kernel).__name__
        cure = f"routed to W4A16 ({now})" if now == before else f"routed to W4A16 ({now} instead of {before})"
        subject.note(NO_VALUE, form.input, cure)


# On the method or scheme of a layer that was made W4A16: it stays so when weights are reloaded.
ROUTED = "overlay_routed_to_w4a16"
# On a layer whose weights were processed once: what comes after is a reload, and its kernel stays.
PROCESSED = "overlay_processed"


def is_routed(owner: object) -> bool:
    return getattr(owner, ROUTED, False)


def offer_plain_input(layer: torch.nn.Module, kernel: object) -> None:
    """Withdraw the layer's offer to take quantised activations, which fused operations read at run time."""
    layer.__dict__.pop("_input_quant_key", None)
    from vllm.model_executor.layers.fusion.quant_activation import expose_input_quant_key

    expose_input_quant_key(layer, kernel)


def quantises_activations(owner: object) -> bool:
    """Does the kernel that was selected for this layer read the checkpoint's input scale? (Humming's does.)"""
    declared = getattr(owner, "spec", None)  # ModelOpt since 0.30
    if getattr(owner, "use_a16", False) or (declared is not None and declared.activation is None):
        return False
    names = type(owner).__name__, type(owner.kernel).__name__
    return not (any("W4A16" in name for name in names) or names[1].startswith("Marlin"))


def weight_only_kernel(subject: Subject, form: LinearFormat) -> object:
    """The kernel vLLM takes for NVFP4 weights with 16-bit activations on this GPU."""
    from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel

    try:
        return init_nvfp4_linear_kernel(use_a16=True)
    except ValueError as error:
        raise subject.refuse(
            NO_VALUE,
            form.input,
            f"No kernel of this GPU computes NVFP4 weights with 16-bit activations. vLLM says: {error}",
        ) from error


def route_modelopt(method: object) -> None:
    """`ModelOptLinearMethod`, since 0.30: the specification without its activation half."""
    method.spec = type(method.spec)(weight=method.spec.weight, activation=None)
    method.akey = None


def route_compressed_tensors(scheme: object) -> None:
    scheme.use_a16 = True


def route_nothing(owner: object) -> None:
    """The method has no W4A16 form: `finish_weight_only` takes the place of its processing."""


def finish_weight_only(owner: object, layer: torch.nn.Module) -> None:
    """Process a layer of Quark, or of ModelOpt before 0.30, as vLLM processes a W4A16 layer of ModelOpt."""
    layer.weight_global_scale = torch.nn.Parameter(layer.weight_scale_2.max().float(), requires_grad=False)
    del layer.weight_scale_2
    owner.kernel.process_weights_after_loading(layer)
