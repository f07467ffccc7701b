"""No NVFP4 expert or linear layer computes with a scale that nobody loaded."""

import ast
import logging
from types import ModuleType

from overlay.context import Context
from overlay.declare import Option, Patch, Target, Verdict, absent, present
from overlay.nvfp4.policy import LARGEST_SCALE, SMALLEST_SCALE, Policy

QUANTIZATION = "vllm.model_executor.layers.quantization"
MODELOPT = f"{QUANTIZATION}.modelopt"
CT_EXPERTS = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"
CT_LINEAR = f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
QUARK_EXPERTS = f"{QUANTIZATION}.quark.quark_moe"
QUARK_LINEAR = f"{QUANTIZATION}.quark.schemes.quark_nvfp4"
MODEL_LOADER = "vllm.model_executor.model_loader.utils"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
RELOAD_TENSORS = "vllm.model_executor.model_loader.reload.meta"
EXPERT_CONFIG = "vllm.model_executor.layers.fused_moe.config"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
MARLIN_EXPERTS = f"{QUANTIZATION}.utils.marlin_utils_fp4"
MARLIN_LINEAR = "vllm.model_executor.kernels.linear.nvfp4.marlin"

# Class -> name of its format in overlay.nvfp4.experts.
EXPERTS = {
    (MODELOPT, "ModelOptNvFp4FusedMoE"): "MODELOPT",
    (CT_EXPERTS, "CompressedTensorsW4A4Nvfp4MoEMethod"): "COMPRESSED_TENSORS",
    (QUARK_EXPERTS, "QuarkNvfp4MoEMethod"): "QUARK",
}
# Class -> name of its format in overlay.nvfp4.linears, and of the function there that makes it forget its input scale.
LINEARS = {
    (MODELOPT, "ModelOptLinearMethod"): ("MODELOPT", "route_modelopt"),  # since 0.30
    (MODELOPT, "ModelOptNvFp4LinearMethod"): ("MODELOPT", "route_nothing"),  # until 0.29
    (MODELOPT, "ModelOptNvFp4W4A16LinearMethod"): ("MODELOPT", "route_nothing"),  # until 0.29
    (CT_LINEAR, "CompressedTensorsW4A4Fp4"): ("COMPRESSED_TENSORS", "route_compressed_tensors"),
    (QUARK_LINEAR, "QuarkNVFP4"): ("QUARK", "route_nothing"),
}
# Last step of a conversion: the experts multiply the input scales into their alphas. Quark's conversion lacks it.
FOLD = "fused_experts.process_weights_after_loading"


def policy(ctx: Context) -> Policy:
    return Policy(all_missing=ctx.options["all_missing"], some_bad=ctx.options["some_bad"])


def probe(ctx: Context) -> Verdict:
    """Does the installed vLLM create an input scale as uninitialised memory?"""
    exposed = [name for module, name in (*EXPERTS, *LINEARS) if leaves_input_scale_unset(ctx, module, name)]
    if not exposed:
        return absent("every NVFP4 method of this vLLM gives its input scale a value at creation")
    return present(f"input scales start as uninitialised memory in {', '.join(exposed)}")


def leaves_input_scale_unset(ctx: Context, module: str, name: str) -> bool:
    """Is the input scale that this class registers `torch.empty`? ModelOpt's helper fills only what is given `init`."""
    owner = "KNvfp4Dynamic" if name == "ModelOptLinearMethod" else name
    creator = ctx.sources.definition(module, f"{owner}.create_weights")
    if creator is None:
        return False
    statements = [ast.unparse(node) for node in ast.walk(creator) if isinstance(node, ast.Assign | ast.Expr)]
    return any(
        ("input_" in text.partition("=")[0] and "scale" in text.partition("=")[0] and "torch.empty" in text)
        or ("register_params" in text and "'input_scale'" in text and "init=" not in text)
        for text in statements
    )


def wrap_methods(module: ModuleType, ctx: Context) -> None:
    """Creation and processing of every NVFP4 method that `module` defines."""
    from overlay.nvfp4 import experts, linears, wrappers

    rules = policy(ctx)
    for (home, name), form_name in EXPERTS.items():
        if home == module.__name__:
            form = getattr(experts, form_name)
            guard = wrappers.guard_derived(getattr(module, name), form, rules)
            ctx.wrap(module, f"{name}.create_weights", wrappers.create(experts.watch, form, guard))
            process = wrappers.process_experts(form, rules, folds=FOLD in ctx.sources.source_of(home, name))
            ctx.wrap(module, f"{name}.process_weights_after_loading", process)
            if hasattr(getattr(module, name), "dequantize_weight"):
                ctx.wrap(module, f"{name}.dequantize_weight", wrappers.dequantize_experts(form))
    for (home, name), (form_name, route) in LINEARS.items():
        if home == module.__name__ and hasattr(module, name):
            form = getattr(linears, form_name)
            process = wrappers.process_linear(form, rules, getattr(linears, route))
            ctx.wrap(module, f"{name}.create_weights", wrappers.create(linears.watch, form))
            ctx.wrap(module, f"{name}.process_weights_after_loading", process)


def wrap_modelopt(module: ModuleType, ctx: Context) -> None:
    """Its methods, and the two places where a configuration becomes a method."""
    from overlay.nvfp4 import wrappers

    wrap_methods(module, ctx)
    ctx.wrap(module, "ModelOptNvFp4Config._from_config", wrappers.modelopt_config)
    ctx.wrap(module, "ModelOptQuantConfigBase.get_quant_method", wrappers.modelopt_method)
    ctx.wrap(module, "ModelOptMixedPrecisionConfig.get_quant_method", wrappers.mixed_method)


def wrap_loader(module: ModuleType, ctx: Context) -> None:
    from overlay.nvfp4 import wrappers

    ctx.wrap(module, "process_weights_after_loading", wrappers.process_model)


def wrap_reload(module: ModuleType, ctx: Context) -> None:
    from overlay.nvfp4 import wrappers

    ctx.wrap(module, "finalize_layerwise_processing", wrappers.process_model)


def wrap_reload_tensors(module: ModuleType, ctx: Context) -> None:
    from overlay.nvfp4 import wrappers

    ctx.wrap(module, "materialize_meta_tensor", wrappers.materialize)


def correct_marlin(module: ModuleType, ctx: Context) -> None:
    """On a GPU with FP4 tensor cores, rewrite the log line that says it has none."""
    from overlay.nvfp4 import marlin

    devices = ctx.hardware.devices
    if devices and all(device.capability >= (10, 0) for device in devices):
        logger = logging.getLogger(module.__name__)
        logger.addFilter(marlin.correct)
        ctx.undo.append(lambda: logger.removeFilter(marlin.correct))


CREATE_EXPERTS = (
    "(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)"
)
CREATE_LINEAR = (
    "(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, "
    "**extra_weight_attrs)"
)
CREATE_SCHEME = "(self, layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs)"


def targets() -> tuple[Target, ...]:
    """Everything wrapped, and the two functions that a re-routed layer's kernel is chosen with."""
    creators = {**dict.fromkeys(EXPERTS, CREATE_EXPERTS), **dict.fromkeys(LINEARS, CREATE_LINEAR)}
    creators |= {key: CREATE_SCHEME for key in LINEARS if key[0] in (CT_LINEAR, QUARK_LINEAR)}
    methods = []
    for (module, name), signature in creators.items():
        one_of_several = (module, name) in LINEARS and module == MODELOPT
        methods += [
            Target(module, f"{name}.create_weights", (signature,), optional=one_of_several),
            Target(module, f"{name}.process_weights_after_loading", ("(self, layer)",), optional=one_of_several),
        ]
    methods += [
        Target(module, f"{name}.dequantize_weight", ("(self, layer)",), optional=True) for module, name in EXPERTS
    ]
    return (
        *methods,
        Target(
            MODELOPT,
            "ModelOptNvFp4Config._from_config",
            ("(cls, *, quant_method, kv_cache_quant_method, exclude_modules, original_config, group_size, **kwargs)",),
        ),
        Target(MODELOPT, "ModelOptQuantConfigBase.get_quant_method", ("(self, layer, prefix)",)),
        Target(MODELOPT, "ModelOptMixedPrecisionConfig.get_quant_method", ("(self, layer, prefix)",)),
        Target(MODELOPT, "ModelOptMixedPrecisionConfig._resolve_quant_algo", ("(self, prefix)",)),
        Target(MODELOPT, "ModelOptMixedPrecisionConfig._quantized_layer_prefix_candidates", ("(prefix)",)),
        Target(EXPERT_CONFIG, "FusedMoEConfig.hidden_dim_unpadded"),
        Target(EXPERT_CONFIG, "FusedMoEConfig.intermediate_size_per_partition_unpadded"),
        Target(ORACLE, "select_nvfp4_moe_backend", ("(config, weight_key, activation_key)",)),
        Target(ORACLE, "_use_a16", ("(backend, checkpoint_uses_a16)",), optional=True),  # since 0.30
        Target(LINEAR_KERNELS, "init_nvfp4_linear_kernel", ("(use_a16=...)",)),
        Target(MODEL_LOADER, "process_weights_after_loading", ("(model, model_config, target_device)",)),
        Target(RELOAD, "finalize_layerwise_processing", ("(model, model_config)",)),
        Target(RELOAD_TENSORS, "materialize_meta_tensor", ("(meta_tensor)",)),
    )


PATCH = Patch(
    id="nvfp4_moe_scales",
    title="NVFP4 layers never compute with a scale that nobody loaded",
    why=(
        "vLLM allocates activation and weight scales with torch.empty and expects the checkpoint to fill them. A "
        "weight-only checkpoint has no activation scales, some lack those of single experts: the kernels then multiply "
        "by what was in memory. The model loads, reports healthy, and repeats one token, or answers some prompts with "
        "nothing."
    ),
    how=(
        "Scales are NaN until something is loaded into them. Before they are folded into a kernel's format, a layer "
        "without activation scales is given a backend with 16-bit activations (all_missing), single bad scales are "
        "repaired from the layer's valid ones (some_bad), gate and up with different global scales are reconciled, and "
        "a missing weight scale is refused by name. A complete checkpoint is left as it is, bit for bit."
    ),
    upstream=(
        "vllm-project/vllm#54189",
        "vllm-project/vllm#54427",
        "vllm-project/vllm#45320",
        "vllm-project/vllm#54974",
        "vllm-project/vllm#57532",
    ),
    until=(
        "vLLM creates every NVFP4 scale with a sentinel and refuses or re-routes a layer whose scales were not loaded "
        "(vllm-project/vllm#45320); #54427, in 0.29, recognises one shape of configuration only"
    ),
    targets=targets(),
    options=(
        Option(
            "all_missing",
            (str, float),
            "route",
            'a layer without any usable activation scale: "route" it to a backend with 16-bit activations, "refuse" to '
            "start, or the number to use as its scale",
            choices=("route", "refuse"),
            limits=(SMALLEST_SCALE, LARGEST_SCALE),
        ),
        Option(
            "some_bad",
            str,
            "repair",
            'single unusable activation scales: "repair" them with the maximum of the layer\'s valid ones, or "refuse" '
            "to start",
            choices=("repair", "refuse"),
        ),
    ),
    probe=probe,
    apply={
        MODELOPT: wrap_modelopt,
        CT_EXPERTS: wrap_methods,
        CT_LINEAR: wrap_methods,
        QUARK_EXPERTS: wrap_methods,
        QUARK_LINEAR: wrap_methods,
        MODEL_LOADER: wrap_loader,
        RELOAD: wrap_reload,
        RELOAD_TENSORS: wrap_reload_tensors,
        MARLIN_EXPERTS: correct_marlin,
        MARLIN_LINEAR: correct_marlin,
    },
)
