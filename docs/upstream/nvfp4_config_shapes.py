"""Which spellings of a weight-only NVFP4 checkpoint vLLM takes for W4A4. CPU only: python nvfp4_config_shapes.py"""

from importlib.metadata import version

WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
ACTIVATIONS = dict(WEIGHTS)
FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
OWN_FILE = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}
PRODUCER = {"name": "modelopt", "version": "0.45.0"}


def groups(*activations: object) -> dict[str, object]:
    """One config group for each value of `input_activations`."""
    return {f"group_{i}": {"weights": WEIGHTS, "input_activations": value} for i, value in enumerate(activations)}


# None of these checkpoints ships an activation scale for its experts, and each says so or says nothing about it.
SHAPES = {
    "config.json, input_activations null (control)": {**FLAT, "config_groups": groups(None)},
    "config.json without config_groups": FLAT,
    "config.json, config_groups empty": {**FLAT, "config_groups": {}},
    "config.json, input_activations {}": {**FLAT, "config_groups": groups({})},
    "config.json, config_groups as a list": {**FLAT, "config_groups": list(groups(None).values())},
    "config.json, experts weight-only, another group W4A4": {**FLAT, "config_groups": groups(ACTIVATIONS, None)},
    "hf_quant_config.json without config_groups": {"quantization": OWN_FILE, "producer": PRODUCER},
    "hf_quant_config.json, config_groups inside": {
        "quantization": {**OWN_FILE, "config_groups": groups(None)},
        "producer": PRODUCER,
    },
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": [],
    "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}},
}


def resolved() -> dict[str, str]:
    """Shape -> what vLLM's own configuration classes make of it."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config

    found = {name: ModelOptNvFp4Config.from_config(shape).quant_method for name, shape in SHAPES.items()}
    mixed = ModelOptMixedPrecisionConfig.from_config(MIXED)
    return {**found, "MIXED_PRECISION, experts NVFP4": mixed.nvfp4_config.quant_method}


def reproduce() -> dict[str, object]:
    """The shapes that are computed as W4A4, with activation scales that nobody loads."""
    found = resolved()
    return {"resolved": found, "wrong": [name for name, method in found.items() if method == "NVFP4"]}


if __name__ == "__main__":
    result = reproduce()
    print(f"vllm {version('vllm')}")
    for name, method in result["resolved"].items():
        print(f"{method:<12}  {name}")
    print(f"{len(result['wrong'])} shapes are taken for W4A4; W4A16_NVFP4 is right for each")
