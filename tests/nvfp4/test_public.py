"""The configurations of public checkpoints, and those that `python -m overlay tiny` writes, by the installed vLLM."""

import pytest

from tests import installed
from tests.nvfp4.outcomes import experts, is_sane

W4A4, W4A16 = ("ModelOptNvFp4FusedMoE", False), ("ModelOptNvFp4FusedMoE", True)
UNQUANTISED = ("UnquantizedLinearMethod", False)
needs_glm = pytest.mark.skipif(not installed.HAS_GLM, reason="GLM-5.3-Flash, whose class loads it, came with vLLM 0.30")
W4A16_LINEAR = "ModelOptLinearMethod" if installed.LINEAR_CLASSES_ARE_ONE else "ModelOptNvFp4W4A16LinearMethod"


def require_mixed_precision(layer: str, before: dict) -> None:
    """Skip what stock vLLM refuses by name: mixed precision in a file of its own."""
    if layer.startswith("mix-nested") and not installed.READS_NESTED_MIXED_PRECISION:
        assert "Unknown ModelOpt quant algo: MIXED_PRECISION" in before["error"]
        pytest.skip("vLLM before 0.33 refuses MIXED_PRECISION in hf_quant_config.json")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("mo-flat-glm52/experts model.layers.3.mlp.experts", W4A4),
        ("mo-flat-glm52/experts model.layers.10.mlp.experts", W4A4),
        ("mo-flat-glm52/linear model.layers.10.self_attn.q_a_proj", UNQUANTISED),
        ("mo-flat-glm52/linear model.layers.0.mlp.down_proj", UNQUANTISED),
        ("mo-nested-glm5/experts model.layers.3.mlp.experts", W4A4),
        ("mo-nested-glm5/experts model.layers.78.mlp.experts", ("NoneType", False)),
        ("mo-flat-minimax-m27/experts model.layers.0.block_sparse_moe.experts", W4A4),
        ("mo-flat-minimax-m27/linear model.layers.0.block_sparse_moe.gate", UNQUANTISED),
        ("mix-flat-qwen36-35b/experts language_model.model.layers.0.mlp.experts", W4A16),
        ("mix-flat-qwen36-35b/linear language_model.model.layers.7.mlp.gate", UNQUANTISED),
        ("mix-nested-qwen36-35b/experts language_model.model.layers.39.mlp.experts", W4A16),
        ("mo-weightonly-glm53flash-libertai/experts model.layers.0.mlp.experts", W4A16),
        ("mo-weightonly-glm53flash-libertai/linear model.layers.0.self_attn.o_proj", (W4A16_LINEAR, True)),
        ("ct-w4a4-devstral2-autoround/linear model.layers.0.self_attn.o_proj", ("CompressedTensorsW4A4Fp4", False)),
        (
            "ct-mix-w4a16-qwen38-35b-distill/experts model.layers.0.mlp.experts",
            ("CompressedTensorsW4A4Nvfp4MoEMethod", True),
        ),
        (
            "ct-mix-w4a16-qwen38-35b-distill/linear model.layers.0.mlp.shared_expert.down_proj",
            ("CompressedTensorsW4A4Fp4", True),
        ),
        ("ct-mix-w4a16-qwen38-35b-distill/linear model.layers.0.self_attn.o_proj", ("CompressedTensorsW8A8Fp8", False)),
        ("ct-mix-w4a16-qwen38-35b-distill/linear mtp.layers.0.self_attn.o_proj", UNQUANTISED),
        ("neg-int4-kimi-k25/experts model.layers.1.mlp.experts", ("CompressedTensorsWNA16MoEMethod", False)),
        ("neg-int4-kimi-k25/linear model.layers.1.self_attn.o_proj", UNQUANTISED),
        ("mix-nested-step35-flash-w8a8sq/experts model.layers.3.moe.experts", W4A4),
        ("mix-nested-step35-flash-w8a8sq/linear model.layers.9.mlp.down_proj", UNQUANTISED),
        ("mix-nested-step35-flash-w8a8sq/linear ", UNQUANTISED),
        ("quark-nvfp4-fixture/experts model.layers.0.mlp.experts", ("QuarkNvfp4MoEMethod", False)),
        ("quark-nvfp4-fixture/linear model.layers.0.mlp.down_proj", ("QuarkNVFP4", False)),
    ],
)
def test_public_configurations(wrapped, stock, layer, expected):
    before, outcome = stock[f"public/{layer}"], wrapped[f"public/{layer}"]
    require_mixed_precision(layer, before)
    assert (outcome["method"], outcome["w4a16"]) == expected
    if layer.startswith("mo-weightonly") and not installed.READS_NULL_ACTIVATIONS:
        assert not before["w4a16"]
    else:  # read rightly by vLLM
        assert {**outcome, "log": []} == before


@pytest.mark.parametrize("layer", ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"])
def test_a_public_checkpoint_with_an_unknown_algorithm(stock, wrapped, layer):
    name = f"public/mix-nested-step35-flash-w8a8sq/linear {layer}"
    require_mixed_precision("mix-nested", stock[name])
    assert (
        f"AlgorithmError: layer {layer}: the checkpoint quantises it with W8A8_SQ_PER_CHANNEL" in wrapped[name]["error"]
    )
    assert stock[name]["method"] == "UnquantizedLinearMethod"


@pytest.mark.parametrize("name", ["mo-stub-nemotron3-super", "mo-nested-minimax-m21-gadflyii"])
def test_a_file_that_does_not_say_enough(wrapped, name):
    """Not taken for W4A4 on the word of such a file: vLLM does not recognise it, and refuses to be told."""
    assert "does not match the quantization method specified" in wrapped[f"public/{name}/asked for"]["error"]
    missing = "has no parameter" if installed.since(0, 30) else "has no attribute"
    assert f"{missing} 'w2_input_scale'" in wrapped["public/unrecognised"]["error"]


@pytest.mark.skipif(not installed.NATIVE_WRITES_ROWS, reason="in 0.30 GLM's attention needs a kernel that needs a GPU")
def test_tiny_checkpoint_with_one_value_for_gate_up(stock, wrapped):
    """GLM's own model class, from a checkpoint that `python -m overlay tiny` wrote."""
    before, after = stock["tiny/genuine_w4a4"], wrapped["tiny/genuine_w4a4"]
    assert len(experts(after)) == 3
    assert not any(is_sane(layer) for layer in experts(before))
    assert all(is_sane(layer) for layer in experts(after))
    (weights,) = [line for line in after["log"] if "layers 1-3: one value for gate and up in w13_weight_scale" in line]
    (inputs,) = [
        line for line in after["log"] if "layers 1-3: no usable value for gate or up in w13_input_scale" in line
    ]
    assert "gate's used for both" in weights
    assert "repaired by the other half" in inputs


@needs_glm
def test_tiny_checkpoint_with_an_unknown_algorithm(stock, wrapped):
    """The configuration excludes the layer as well; vLLM follows that and would load int8 bytes as bf16 numbers."""
    assert "error" not in stock["tiny/mixed_precision_unknown"]
    assert wrapped["tiny/mixed_precision_unknown"]["error"].startswith("AlgorithmError: layer model.layers.0.mlp.")
