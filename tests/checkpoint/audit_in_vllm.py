"""Asks the installed vLLM what the audit says of it: names, labels, processor files, slots. Run as a module; JSON."""

import json
from itertools import product
from pathlib import Path

NAMES = [
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts",
    "model.layers.10.mlp.experts",
    "model.layers.1.mlp.shared_experts.gate_up_proj",
    "model.layers.10.mlp.shared_experts.down_proj",
    "model.layers.10.self_attn.in_proj_qkvbfg_a",
    "model.layers.45.mlp.experts",
    "model.layers.45.mlp.shared_experts.down_proj",
    "language_model.model.layers.0.mlp.gate_up_proj",
    "language_model.model.layers.1.mlp.experts",
    "language_model.model.layers.45.mlp.experts",
    "language_model.model.layers.10.mlp.shared_experts.gate_up_proj",
    "language_model.lm_head",
    "lm_head",
    "visual.blocks.0.mlp.down_proj",
]
LISTS = [
    [],
    ["lm_head"],
    ["mlp.gate"],
    ["model.layers.0.mlp.gate"],
    ["*.mlp.gate"],
    ["model.layers.1.*"],
    ["model.layers.1*"],
    ["model.layers.1"],
    ["model.layers.0.mlp.gate_proj"],
    ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
    ["*.gate_proj", "*.up_proj"],
    ["*.gate_up_proj"],
    ["model.layers.1.mlp.experts.0.gate_proj"],
    ["*mlp.experts*"],
    ["model.layers.10.mlp.shared_experts*"],
    ["*.self_attn.q_proj"],
    ["*self_attn*"],
    ["model.layers.45*"],
    ["model.language_model.layers.45*"],
    ["model.language_model.layers.45.mlp.experts*"],
    ["model.language_model.layers.0.mlp.gate_proj", "model.language_model.layers.0.mlp.up_proj"],
    ["model.language_model.layers.1.*"],
    ["model.visual.*"],
    ["model.visual*"],
    ["*layers.45*"],
]
PATTERNS = [
    [],
    ["lm_head"],
    ["re:.*mlp\\.(gate|up)_proj$"],
    ["re:.*mlp\\.gate_proj$"],
    ["re:.*mlp\\.gate$"],
    ["re:model\\.language_model\\..*"],
    ["re:.*gate_up_proj"],
    ["model.layers.0.mlp.gate_up_proj"],
]
MAP = {
    "model.language_model.layers.1.mlp.experts": "W4A16_NVFP4",
    "model.language_model.layers.0.mlp.gate_proj": "FP8",
    "model.language_model.layers.0.mlp.up_proj": "FP8",
    "model.language_model.layers.10.mlp.shared_experts.gate_proj": "FP8",
    "model.language_model.layers.10.mlp.shared_experts.up_proj": "NVFP4",
    "model.language_model.layers.2.moe.up_proj": "NVFP4",
    "lm_head": "NVFP4",
}
MAPPED = [
    "language_model.model.layers.1.mlp.experts",
    "language_model.model.layers.0.mlp.gate_up_proj",
    "language_model.model.layers.10.mlp.shared_experts.gate_up_proj",
    "language_model.model.layers.2.moe.experts",
    "language_model.model.layers.9.mlp.experts",
    "language_model.lm_head",
    "lm_head",
]


# Quark's patterns per layer, each with the format of its weights; and its exclusion list.
QUARK_BY_LAYER = [
    {},
    {"*self_attn*": "fp8_e4m3"},
    {"*gate_proj": "fp8_e4m3", "*up_proj": "fp8_e4m3"},
    {"*mlp.gate_proj": "fp8_e4m3"},
    {"model.layers.1.mlp.experts.0.up_proj": "fp8_e4m3"},
    {"mlp.experts": "fp8_e4m3", "*": "int8"},
]
QUARK_LISTS = [
    [],
    ["lm_head"],
    ["model.layers.1.mlp.experts.3.up_proj"],
    ["re:.*mlp.experts"],
    ["model.layers.10.mlp.experts.*.up_proj"],
]
# Target lists of two groups of compressed-tensors, which the audit calls by their numbers.
TARGETS = [
    [["Linear"], ["re:.*self_attn.*"]],
    [["re:.*self_attn.*"], ["Linear"]],
    [["Linear"], ["re:.*mlp.(gate|up)_proj$"]],
    [["re:.*down_proj"], ["re:.*mlp.*"]],
]


def answer(ask) -> str:
    try:
        return str(ask())
    except ValueError:
        return "conflict"


def modelopt(nested: bool) -> dict[str, str]:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.models.glm5next import Glm5NextForCausalLM, Glm5NextForConditionalGeneration

    found = {}
    for number, name in product(range(len(LISTS)), NAMES):
        config = ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=list(LISTS[number]))
        configure_quant_config(config, Glm5NextForConditionalGeneration if nested else Glm5NextForCausalLM)
        found[f"{number} {name}"] = answer(lambda config=config, name=name: config.is_layer_excluded(name))
    return found


def compressed(nested: bool) -> dict[str, str]:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.models.glm5next import Glm5NextForConditionalGeneration

    packed = Glm5NextForConditionalGeneration.packed_modules_mapping if nested else {}
    return {
        f"{number} {name}": answer(lambda number=number, name=name: should_ignore_layer(name, PATTERNS[number], packed))
        for number, name in product(range(len(PATTERNS)), NAMES)
    }


def mixed() -> dict[str, str]:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.models.glm5next import Glm5NextForConditionalGeneration

    layers = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in MAP.items()}
    config = ModelOptMixedPrecisionConfig.from_config(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    )
    configure_quant_config(config, Glm5NextForConditionalGeneration)
    return {name: answer(lambda name=name: config._resolve_quant_algo(name)) for name in MAPPED}


def quark() -> dict[str, dict[str, str]]:
    """Whether a list excludes a module, and the weights' format by layer. The experts are asked for as such."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer as ignored_linear
    from vllm.model_executor.layers.quantization.quark import quark as module
    from vllm.models.glm5next import Glm5NextForConditionalGeneration

    packed = Glm5NextForConditionalGeneration.packed_modules_mapping
    excluded, formats = {}, {}
    ignored = getattr(module, "should_ignore_layer", ignored_linear)
    for number, name in product(range(len(QUARK_LISTS)), NAMES):
        more = {"check_children": name.endswith(".experts")}
        ask = lambda n=name, e=QUARK_LISTS[number], m=more: ignored(n, ignore=e, fused_mapping=packed, **m)  # noqa: E731
        excluded[f"{number} {name}"] = answer(ask)
    for number, name in product(range(len(QUARK_BY_LAYER)), NAMES):
        by_layer = {pattern: {"weight": {"dtype": kind}} for pattern, kind in QUARK_BY_LAYER[number].items()}
        settings = {"weight": {"dtype": "int4"}}
        config = module.QuarkConfig(
            {"layer_quant_config": by_layer, "layer_type_quant_config": {}, "global_quant_config": settings}
        )
        config.packed_modules_mapping = dict(packed)
        ask = lambda c=config, n=name: c._find_matched_config(n, LinearBase)["weight"]["dtype"]  # noqa: E731
        formats[f"{number} {name}"] = answer(ask)
    return {"excluded": excluded, "formats": formats}


def targets() -> dict[str, str]:
    """The number of the group that compressed-tensors finds for a linear module."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target
    from vllm.models.glm5next import Glm5NextForConditionalGeneration

    packed = Glm5NextForConditionalGeneration.packed_modules_mapping
    linear, found = ReplicatedLinear.__new__(ReplicatedLinear), {}
    for number, name in product(range(len(TARGETS)), NAMES):
        groups = {target: str(group) for group, listed in enumerate(TARGETS[number]) for target in listed}
        found[f"{number} {name}"] = groups.get(find_matched_target(name, linear, groups, packed), "None")
    return found


def slots() -> dict[str, list[bool]]:
    """Which slots of a fused linear layer's scales are filled by a scale that is stored for the whole, or for a part.

    Last: it sets the process up as one worker on the CPU.
    """
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    from overlay.nvfp4.cpu_load import start

    start()
    found = {}
    with set_current_vllm_config(VllmConfig()):
        given = {
            "quant_config": ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=[]),
            "bias": False,
            "params_dtype": torch.bfloat16,
        }
        layers = {
            "q": QKVParallelLinear(256, 64, 4, 2, prefix="a.qkv_proj", **given),
            0: MergedColumnParallelLinear(256, [128, 128], prefix="a.gate_up_proj", **given),
        }
        for (part, layer), name in product(layers.items(), ("weight_scale_2", "input_scale")):
            for which in ((), (part,)):
                parameter = getattr(layer, name)
                parameter.data.fill_(float("nan"))
                parameter.weight_loader(parameter, torch.tensor(0.02), *which)
                key = f"{type(layer).__name__} {name} {'part' if which else 'whole'}"
                found[key] = (~parameter.data.isnan()).tolist()
    return found


def labels(forms: list[dict]) -> dict[str, str]:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    return {form["id"]: ModelOptNvFp4Config.from_config(form["quantization"]).quant_method for form in forms}


def processors(folder: Path) -> dict[str, object]:
    """Image and video token limits that vLLM's processor ends up with, by the file that gives them; or the error."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from overlay.checkpoint.tiny import write
    from overlay.checkpoint.tiny_config import TinyModel, processor_config

    settings = processor_config()
    settings["image_processor"]["max_image_tokens"] = 777
    settings["video_processor"]["max_image_tokens"] = 888
    files = {
        "processor_config": {"processor_config.json": settings},
        "preprocessor_config": {"preprocessor_config.json": settings["image_processor"]},
        "preprocessor_config, nested": {"preprocessor_config.json": settings},
        "none": {},
    }
    found = {}
    for name, contents in files.items():
        write(TinyModel(heads=8, nested=True), folder / name)
        (folder / name / "processor_config.json").unlink()
        for file, content in contents.items():
            (folder / name / file).write_text(json.dumps(content))
        try:
            config = ModelConfig(model=str(folder / name), max_model_len=4096)
            processor = MULTIMODAL_REGISTRY.create_processor(config).info.get_hf_processor()
            found[name] = [processor.image_processor.max_image_tokens, processor.video_processor.max_image_tokens]
        except OSError as problem:
            found[name] = str(problem)
    return found


if __name__ == "__main__":
    import logging
    import sys

    logging.disable(logging.WARNING)
    with open(sys.argv[1]) as stream:
        forms = json.load(stream)
    print(
        json.dumps(
            {
                "modelopt nested": modelopt(True),
                "modelopt flat": modelopt(False),
                "compressed nested": compressed(True),
                "compressed flat": compressed(False),
                "mixed": mixed(),
                "labels": labels(forms),
                "processors": processors(Path(sys.argv[2])),
                "quark": quark(),
                "targets": targets(),
                "slots": slots(),
            }
        )
    )
