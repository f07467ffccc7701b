"""Wrappers, in wrapt's form, around vLLM's NVFP4 methods. They decide whether to act; the other modules know how."""

from collections.abc import Callable

from overlay.nvfp4 import experts, findings, linears, promotion, unloaded
from overlay.nvfp4.policy import Policy


def create(watch: Callable, form: object, guard: Callable[[object], None] | None = None) -> Callable:
    """Around `create_weights` of experts and linear layers: `watch(layer, form, is_dummy)` fills their scales with NaN.

    `guard(method)` looks after methods whose processing is not wrapped.
    """

    def wrapper(wrapped, method, args, kwargs):
        result = wrapped(*args, **kwargs)
        watch(layer_of(args, kwargs), form, is_dummy_load())
        if guard is not None:
            guard(method)
        return result

    return wrapper


def guard_derived(base: type, form: experts.ExpertFormat, policy: Policy) -> Callable[[object], None]:
    """For methods derived from `base` that process weights in a way of their own: their scales are checked before."""
    name = "process_weights_after_loading"

    def guard(method: object) -> None:
        owner = next(kind for kind in type(method).__mro__ if name in vars(kind))
        if owner is base or name in vars(method):
            return
        process = getattr(method, name)

        def checked(layer: object) -> None:
            prepared = not are_preprocessed() and experts.prepare(method, layer, form, policy, is_derived=True)
            process(layer)
            if prepared:
                experts.verify(method, layer, form)

        setattr(method, name, checked)

    return guard


def process_experts(form: experts.ExpertFormat, policy: Policy, folds: bool) -> Callable:
    """Around `process_weights_after_loading` of an experts' method. `folds`: does it end with the experts' own step?"""

    def wrapper(wrapped, method, args, kwargs):
        layer = layer_of(args, kwargs)
        if are_preprocessed():
            return wrapped(*args, **kwargs)
        prepared = experts.prepare(method, layer, form, policy)
        global_scales = None if folds else getattr(layer, form.globals[0]).data[:, 0].clone()
        wrapped(*args, **kwargs)
        if global_scales is not None:
            experts.fold_input_scales(method, layer, form, global_scales)
        if prepared:
            experts.verify(method, layer, form)

    return wrapper


def dequantize_experts(form: experts.ExpertFormat) -> Callable:
    """Around `dequantize_weight`, by which online quantisation reads a checkpoint's experts."""

    def wrapper(wrapped, method, args, kwargs):
        experts.prepare_dequantization(layer_of(args, kwargs), form)
        return wrapped(*args, **kwargs)

    return wrapper


def process_linear(form: linears.LinearFormat, policy: Policy, route: Callable[[object], None]) -> Callable:
    """Around `process_weights_after_loading` of a linear layer's method or scheme."""

    def wrapper(wrapped, owner, args, kwargs):
        layer = layer_of(args, kwargs)
        if are_preprocessed():
            return wrapped(*args, **kwargs)
        if not linears.prepare(owner, layer, form, policy, route):
            return None
        if linears.is_routed(owner) and route is linears.route_nothing:
            return linears.finish_weight_only(owner, layer)
        return wrapped(*args, **kwargs)

    return wrapper


def process_model(wrapped, _, args, kwargs):
    """Around the loader's pass over a whole model: its layers' findings become one line per kind."""
    model = kwargs["model"] if "model" in kwargs else args[0]
    config = kwargs["model_config"] if "model_config" in kwargs else args[1]
    with findings.loading(model, draft=getattr(config, "runner_type", None) == "draft"):
        return wrapped(*args, **kwargs)


def materialize(wrapped, _, args, kwargs):
    """Around the rebuilding of one parameter for a reload."""
    tensor = wrapped(*args, **kwargs)
    unloaded.refill(tensor)
    return tensor


def modelopt_config(wrapped, cls, args, kwargs):
    """Around `ModelOptNvFp4Config._from_config`: a configuration that states weight-only is taken at its word."""
    config = wrapped(*args, **kwargs)
    groups = promotion.config_groups(kwargs["original_config"])
    if config.quant_method == "NVFP4" and promotion.is_weight_only(groups):
        findings.LOG.info("the configuration quantises weights alone: NVFP4 layers are W4A16 from the start")
        config = wrapped(*args, **{**kwargs, "quant_method": "W4A16_NVFP4"})
    config.overlay_groups = groups
    return config


def modelopt_method(wrapped, config, args, kwargs):
    return promotion.experts_method(wrapped, config, *args, **kwargs)


def mixed_method(wrapped, config, args, kwargs):
    return promotion.known_method(wrapped, config, *args, **kwargs)


def layer_of(args: tuple, kwargs: dict):
    return kwargs["layer"] if "layer" in kwargs else args[0]


def is_dummy_load() -> bool:
    """Dummy weights are random or fixed numbers of vLLM's own: nobody's scales, and nothing to decide about."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def are_preprocessed() -> bool:
    """Weights from vLLM's weight cache arrive in a kernel's format; the process that made them checked them."""
    from vllm.model_executor import utils

    return getattr(utils, "is_weights_pre_processed", lambda: False)()  # since 0.30
