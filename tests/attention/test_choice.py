"""The table of when this backend takes over, as a function, without vLLM."""

import itertools
from dataclasses import replace

import pytest

from overlay.attention import choice

LAYER = choice.Layer(
    capability=(12, 1),
    use_mla=True,
    use_sparse=True,
    head_size=512,
    rope_size=0,
    kv_cache_dtype="auto",
    index_topk=2048,
    dcp=False,
    selected=None,
)
OLD = "this vLLM's cache writer refuses rows without rope"


def decide(layer, wanted="auto", defect=None, refusal=None):
    return choice.choose(layer, wanted=wanted, native_defect=lambda: defect, stock_refusal=lambda: refusal)


@pytest.fixture(autouse=True)
def only_the_family():
    choice.opened.clear()
    yield
    choice.opened.clear()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_a_vllm_without_a_working_path_leaves_every_dtype_to_us(dtype):
    assert decide(replace(LAYER, kv_cache_dtype=dtype), defect=OLD) == choice.Choice(True, OLD)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_rows_the_native_path_lacks_are_ours(dtype, capability):
    assert decide(replace(LAYER, kv_cache_dtype=dtype, capability=capability)).ours is True


def test_auto_stays_native_unless_true():
    assert decide(LAYER).ours is False
    assert decide(LAYER, wanted=True).ours is True


@pytest.mark.parametrize("change", [{"dcp": True}, {"index_topk": 1024}, {"index_topk": None}])
def test_auto_is_ours_where_the_native_path_cannot_run(change):
    assert decide(replace(LAYER, **change)).ours is True


def test_auto_is_ours_where_vllm_refuses_its_own_backends():
    found = decide(LAYER, refusal="FLASHINFER_MLA_SPARSE_SM120: requires FlashInfer's sparse MLA decode API")
    assert found.ours is True
    assert "requires FlashInfer's sparse MLA decode API" in found.reason


@pytest.mark.parametrize("wanted", ["auto", True])
@pytest.mark.parametrize("defect", [None, OLD])
@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "nvfp4", "fp8_e5m2", "nvfp4_ds_mla"])
def test_other_rows_are_never_ours(dtype, wanted, defect):
    assert decide(replace(LAYER, kv_cache_dtype=dtype, dcp=True), wanted=wanted, defect=defect).ours is False


@pytest.mark.parametrize(
    ("change", "wanted", "defect"),
    list(
        itertools.product(
            [
                {"rope_size": 64},
                {"rope_size": None},
                {"head_size": 576},
                {"use_mla": False},
                {"use_sparse": False},
                {"capability": (9, 0)},
                {"capability": (10, 0)},
                {"capability": (11, 0)},
            ],
            ["auto", True],
            [None, OLD],
        )
    ),
)
def test_layers_that_are_not_ours_are_not_even_spoken_of(change, wanted, defect):
    assert decide(replace(LAYER, kv_cache_dtype="bfloat16", **change), wanted=wanted, defect=defect).ours is None


@pytest.mark.parametrize("wanted", ["auto", True])
@pytest.mark.parametrize("defect", [None, OLD])
def test_an_explicit_backend_wins(wanted, defect):
    layer = replace(LAYER, kv_cache_dtype="bfloat16", selected="FLASHINFER_MLA_SPARSE_SM120")
    assert decide(layer, wanted=wanted, defect=defect).ours is False


def test_the_option_for_testing_opens_exactly_what_it_names():
    choice.opened.update(choice.parse_capabilities("9.0, 8.9"))
    layer = replace(LAYER, kv_cache_dtype="bfloat16")
    for capability, ours in {(9, 0): True, (8, 9): True, (8, 0): None, (10, 0): None, (12, 1): True}.items():
        assert decide(replace(layer, capability=capability)).ours is ours


@pytest.mark.parametrize("text", ["9", "sm_90", "9.0;8.9", "9.x", "-9.0"])
def test_a_capability_that_is_none_is_named(text):
    with pytest.raises(ValueError, match="is not a compute capability"):
        choice.parse_capabilities(text)


def test_expensive_questions_are_asked_only_where_the_answer_hangs_on_them():
    def must_not_be_asked():
        raise AssertionError("asked in vain")

    rope = replace(LAYER, rope_size=64)
    choice.choose(rope, wanted="auto", native_defect=must_not_be_asked, stock_refusal=must_not_be_asked)
    bf16 = replace(LAYER, kv_cache_dtype="bfloat16")
    choice.choose(bf16, wanted="auto", native_defect=lambda: None, stock_refusal=must_not_be_asked)
