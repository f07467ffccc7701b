"""Small checkpoints in the shape of public ones: their configurations, and tensors as those exporters store them."""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.checkpoint import small
from tests.checkpoint.small import Matrix, Tensors, compressed, nvfp4, plain, scalar, tensor

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "nvfp4" / "public_configs"
EXPERTS = 2
GATED, QKVO = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LINEARS = (*(f"self_attn.{part}" for part in QKVO), *(f"mlp.{part}" for part in GATED))
INDEXER = ("indexer.wq_b", "indexer.wk", "indexer.weights_proj")

# config.json, tensors, further JSON files by stem
Model = tuple[Mapping[str, Any], Tensors, Mapping[str, Mapping]]


def load(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())["config"]


def each(kind: Matrix, prefix: str, names: Iterable[str]) -> Tensors:
    return {name: stored for part in names for name, stored in kind(prefix + part).items()}


def experts(kind: Matrix, prefix: str, parts: Iterable[str] = GATED) -> Tensors:
    return each(kind, prefix, [f"experts.{expert}.{part}" for expert in range(EXPERTS) for part in parts])


def ends(prefix: str = "model.", head: Matrix = plain) -> Tensors:
    return plain(f"{prefix}embed_tokens") | head("lm_head") | {f"{prefix}norm.weight": tensor("BF16", small.HIDDEN)}


def weight_only(name: str) -> Tensors:
    return nvfp4(name, input_scale=None)


def fp8(name: str) -> Tensors:
    """ModelOpt: one scale a tensor."""
    return {f"{name}.weight": tensor("F8_E4M3", 32, 32), f"{name}.weight_scale": scalar(0.01)} | {
        f"{name}.input_scale": scalar(0.01)
    }


def fp8_channels(name: str) -> Tensors:
    return {f"{name}.weight": tensor("F8_E4M3", 32, 32), f"{name}.weight_scale": tensor("BF16", 32, 1)}


def fp8_blocks(name: str) -> Tensors:
    return {f"{name}.weight": tensor("F8_E4M3", 32, 32), f"{name}.weight_scale_inv": scalar(0.01, 1, 1)}


def mxfp8(name: str) -> Tensors:
    return {f"{name}.weight": tensor("F8_E4M3", 32, 32), f"{name}.weight_scale": tensor("U8", 32, 1)}


def int4(name: str) -> Tensors:
    """compressed-tensors, pack-quantized: eight values an I32."""
    return {
        f"{name}.weight_packed": tensor("I32", 32, 4),
        f"{name}.weight_scale": tensor("BF16", 32, 1),
        f"{name}.weight_shape": tensor("I32", 2),
    }


def int8(name: str) -> Tensors:
    return {f"{name}.weight": tensor("I8", 32, 32), f"{name}.weight_scale": tensor("F32", 32)}


def quark(name: str) -> Tensors:
    stored = nvfp4(name)
    stored[f"{name}.input_scale_2"] = stored.pop(f"{name}.input_scale")
    return stored


def stacked(name: str) -> Tensors:
    """ModelOpt's experts of one projection as one tensor, Step-3.5."""
    return {
        f"{name}.weight": tensor("U8", EXPERTS, 32, 16),
        f"{name}.weight_scale": tensor("F8_E4M3", EXPERTS, 32, 2),
        f"{name}.weight_scale_2": scalar(0.02, EXPERTS),
        f"{name}.input_scale": scalar(small.SCALE, EXPERTS),
    }


def glm_dsa(settings: dict[str, Any], mlp: Matrix) -> Tensors:
    """GLM-5 and 5.2: a dense layer, one with experts, and the MTP layer in 16 bits. `mlp`: dense and shared experts."""
    settings |= {"num_hidden_layers": 2, "n_routed_experts": EXPERTS, "num_experts": EXPERTS}
    found = ends() | each(mlp, "model.layers.0.mlp.", GATED)
    for layer in range(3):
        found |= each(plain, f"model.layers.{layer}.self_attn.", (*MLA, *INDEXER))
    for layer, routed, shared in ((1, nvfp4, mlp), (2, plain, plain)):
        name = f"model.layers.{layer}.mlp."
        found |= plain(f"{name}gate", EXPERTS) | {f"{name}gate.e_score_correction_bias": tensor("F32", EXPERTS)}
        found |= experts(routed, name) | each(shared, f"{name}shared_experts.", GATED)
    return found | each(plain, "model.layers.2.", ("eh_proj", "shared_head.head", "embed_tokens"))


def glm52() -> Model:
    """The list names layers 0, 1 and 10 of what is here layers 0 and 1, and the MTP layer."""
    settings = load("mo-flat-glm52")
    listed = settings["quantization_config"]["ignore"]
    listed = [entry.replace("layers.10.", "layers.1.") for entry in listed if entry != "model.layers.1.*"]
    settings["quantization_config"]["ignore"] = [*listed, "model.layers.2*"]
    return settings, glm_dsa(settings, plain), {}


def glm5() -> Model:
    """Attention alone is listed, by every layer's literal names."""
    side = load("mo-nested-glm5")
    listed = [entry.replace("layers.78", "layers.2") for entry in side["quantization"]["exclude_modules"]]
    side["quantization"]["exclude_modules"] = [*listed, *(e.replace("layers.0.", "layers.1.") for e in listed[1:])]
    settings = {"architectures": ["GlmMoeDsaForCausalLM"], "num_nextn_predict_layers": 1}
    return settings, glm_dsa(settings, nvfp4), {"hf_quant_config": side}


def minimax(settings: dict[str, Any]) -> Tensors:
    settings |= {"num_hidden_layers": 1, "num_local_experts": EXPERTS}
    name = "model.layers.0."
    found = ends() | each(plain, f"{name}self_attn.", QKVO)
    found |= {f"{name}self_attn.{part}_proj.{part}_scale": scalar(0.1) for part in "kv"}
    found |= plain(f"{name}block_sparse_moe.gate", EXPERTS)
    found |= {f"{name}block_sparse_moe.e_score_correction_bias": tensor("F32", EXPERTS)}
    return found | experts(nvfp4, f"{name}block_sparse_moe.", ("w1", "w2", "w3"))


def minimax27() -> Model:
    settings = load("mo-flat-minimax-m27")
    return settings, minimax(settings), {}


def minimax21() -> Model:
    settings: dict[str, Any] = {"architectures": ["MiniMaxM2ForCausalLM"]}
    return settings, minimax(settings), {"hf_quant_config": load("mo-nested-minimax-m21-gadflyii")}


def qwen(attention: Matrix, mlp: Matrix, head: Matrix, head_scale: bool = False) -> tuple[dict[str, Any], Tensors]:
    """Qwen3.5 MoE: Gated DeltaNet in layer 0, attention in layer 1, the MTP layer in 16 bits."""
    text = load("mix-flat-qwen36-35b")["text_config"]
    text |= {"num_hidden_layers": 2, "num_experts": EXPERTS, "layer_types": ["linear_attention", "full_attention"]}
    settings = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    found = ends("model.language_model.", head) | plain("model.visual.blocks.0.attn.qkv")
    linear = "model.language_model.layers.0.linear_attn."
    found |= each(attention, linear, ("in_proj_qkv", "in_proj_z", "out_proj"))
    found |= each(plain, linear, ("in_proj_a", "in_proj_b")) | {f"{linear}conv1d.weight": tensor("BF16", 32, 1, 4)}
    found |= {f"{linear}A_log": tensor("BF16", 4), f"{linear}dt_bias": tensor("BF16", 4)}
    found |= each(attention, "model.language_model.layers.1.self_attn.", QKVO)
    found |= each(plain, "mtp.layers.0.self_attn.", QKVO) | plain("mtp.fc")
    layers = {"model.language_model.layers.0.": mlp, "model.language_model.layers.1.": mlp, "mtp.layers.0.": plain}
    for name, kind in layers.items():
        found |= plain(f"{name}mlp.gate", EXPERTS) | plain(f"{name}mlp.shared_expert_gate", 1)
        found |= each(kind, f"{name}mlp.shared_expert.", GATED) | experts(kind, f"{name}mlp.")
    if head_scale:
        found["lm_head.input_scale"] = scalar(small.SCALE)
    return settings, found


def listed_layers(tensors: Tensors, fp8_as: Mapping, nvfp4_as: Mapping) -> dict[str, Mapping]:
    """ModelOpt's quantized_layers for what is stored: experts by their parent."""
    found = {}
    for name, (dtype, *_) in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and dtype in ("U8", "F8_E4M3"):
            module = module.partition(".experts.")[0] + (".experts" if ".experts." in module else "")
            found[module] = fp8_as if dtype == "F8_E4M3" else nvfp4_as
    return found


FP8, WEIGHT_ONLY = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}


def qwen36_flat() -> Model:
    settings, tensors = qwen(fp8, weight_only, weight_only, head_scale=True)
    quantization = load("mix-flat-qwen36-35b")["quantization_config"]
    quantization["quantized_layers"] = listed_layers(tensors, FP8, WEIGHT_ONLY)
    return {**settings, "quantization_config": {"quant_method": "modelopt", **quantization}}, tensors, {}


def qwen36_nested() -> Model:
    settings, tensors = qwen(fp8, weight_only, weight_only, head_scale=True)
    side = load("mix-nested-qwen36-35b")
    side["quantization"]["quantized_layers"] = listed_layers(tensors, FP8, WEIGHT_ONLY)
    return settings, tensors, {"hf_quant_config": side}


def qwen38_distill() -> Model:
    settings, tensors = qwen(fp8_channels, lambda name: compressed(name, None), plain)
    quantization = load("ct-mix-w4a16-qwen38-35b-distill")["quantization_config"]
    return {**settings, "quantization_config": {**quantization, "quant_method": "compressed-tensors"}}, tensors, {}


def step35(dense: Matrix, algorithm: str) -> Model:
    """A dense layer, and one with stacked experts beside a `share_expert`. `dense` stores layer 0 as `algorithm`."""
    side = load("mix-nested-step35-flash-w8a8sq")
    settings = {"architectures": ["Step3p5ForCausalLM"], "num_hidden_layers": 2, "moe_num_experts": EXPERTS}
    found = ends() | each(dense, "model.layers.0.mlp.", GATED)
    for layer in range(2):
        found |= each(plain, f"model.layers.{layer}.self_attn.", (*QKVO, "g_proj"))
    found |= plain("model.layers.1.moe.gate", EXPERTS) | {"model.layers.1.moe.router_bias": tensor("F32", EXPERTS)}
    found |= each(nvfp4, "model.layers.1.share_expert.", GATED) | each(stacked, "model.layers.1.moe.", GATED)
    nvfp4_as = {"quant_algo": "NVFP4", "group_size": 16}
    layers = listed_layers(found, {}, nvfp4_as)
    layers |= {f"model.layers.0.mlp.{part}": {**nvfp4_as, "quant_algo": algorithm} for part in GATED}
    side["quantization"]["quantized_layers"] = layers
    return settings, found, {"hf_quant_config": side}


def nemotron() -> tuple[dict[str, Any], Tensors]:
    """Nemotron-H: Mamba-2, experts of two projections behind a latent one, attention and an MLP, all called mixer."""
    settings = {"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4, "n_routed_experts": EXPERTS}
    name = "backbone.layers.{}.mixer.".format
    found = plain("backbone.embeddings") | plain("lm_head") | {"backbone.norm_f.weight": tensor("BF16", 32)}
    found |= each(nvfp4, name(0), ("in_proj", "out_proj")) | {f"{name(0)}conv1d.weight": tensor("BF16", 32, 1, 4)}
    found |= {f"{name(0)}{part}": tensor("BF16", 4) for part in ("A_log", "D", "dt_bias")}
    found |= plain(f"{name(1)}gate", EXPERTS) | each(nvfp4, name(1), ("fc1_latent_proj", "fc2_latent_proj"))
    found |= experts(nvfp4, name(1), ("up_proj", "down_proj"))
    found |= each(nvfp4, f"{name(1)}shared_experts.", ("up_proj", "down_proj"))
    found |= each(plain, name(2), QKVO) | each(nvfp4, name(3), ("up_proj", "down_proj"))
    return settings, found


def nemotron_whole() -> Model:
    """A list like the published Nemotron-3 Nano's: every module of the 16-bit layers by its name."""
    settings, tensors = nemotron()
    plains = [f"backbone.layers.2.mixer.{part}" for part in QKVO]
    listed = ("lm_head", "backbone.layers.0.mixer.conv1d", "backbone.layers.1.mixer.gate", *plains)
    return {**settings, "quantization_config": small.modelopt(ignore=listed)}, tensors, {}


def nemotron_stub() -> Model:
    settings, tensors = nemotron()
    return settings, tensors, {"hf_quant_config": load("mo-stub-nemotron3-super")}


def libertai() -> Model:
    quantization = copy.deepcopy(load("mo-weightonly-glm53flash-libertai"))["quantization_config"]
    kinds = weight_only, weight_only, weight_only
    tensors = small.model(*kinds, prefix="model.language_model.") | plain("model.visual.blocks.0.attn.qkv")
    return small.nested(quantization), tensors, {"processor_config": {}}


def kimi() -> Model:
    settings = load("neg-int4-kimi-k25")
    settings["text_config"] |= {"num_hidden_layers": 2, "n_routed_experts": EXPERTS}
    found = ends("language_model.model.") | plain("language_model.lm_head")
    del found["lm_head.weight"]
    for layer in range(2):
        name = f"language_model.model.layers.{layer}."
        found |= each(plain, f"{name}self_attn.", MLA)
    found |= each(plain, "language_model.model.layers.0.mlp.", GATED)
    found |= each(plain, f"{name}mlp.shared_experts.", GATED) | experts(int4, f"{name}mlp.")
    return settings, found | plain(f"{name}mlp.gate", EXPERTS), {}


def dense(kind: Matrix, quantization: Mapping, architecture: str) -> Model:
    found = ends() | each(kind, "model.layers.0.self_attn.", QKVO) | each(kind, "model.layers.0.mlp.", GATED)
    settings = {"architectures": [architecture], "num_hidden_layers": 1, "quantization_config": quantization}
    return settings, found, {}


MODELS = {
    "ct-mix-w4a16-qwen38-35b-distill": qwen38_distill,
    "ct-w4a4-devstral2-autoround": lambda: dense(compressed, load("ct-w4a4-devstral2-autoround"), "MistralForCausalLM"),
    "mix-flat-qwen36-35b": qwen36_flat,
    "mix-nested-qwen36-35b": qwen36_nested,
    "mix-nested-step35-flash-w8a8sq": lambda: step35(int8, "W8A8_SQ_PER_CHANNEL"),
    "mo-flat-glm52": glm52,
    "mo-flat-minimax-m27": minimax27,
    "mo-nested-glm5": glm5,
    "mo-nested-minimax-m21-gadflyii": minimax21,
    "mo-stub-nemotron3-super": nemotron_stub,
    "mo-weightonly-glm53flash-libertai": libertai,
    "neg-int4-kimi-k25": kimi,
    "quark-nvfp4-fixture": lambda: dense(quark, load("quark-nvfp4-fixture")["quantization_config"], "LlamaForCausalLM"),
}
