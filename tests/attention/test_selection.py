"""vLLM's real selector, stock and with the patch, for many layers and GPUs: one child process, one question a test.

The same tests hold for other releases: put the files of their wheel in front on PYTHONPATH.
"""

import pytest

from tests.attention.scenario_selection import CAPABILITIES, KV_DTYPES
from tests.conftest import run_python
from tests.gpu.engine_cases import CASES

OURS = "SparseMLABackend"
NATIVE = "FlashInferMLASparseSM120Backend"
NONE = "ValueError: No valid attention backend found"
FAMILY = [(12, 0), (12, 1)]


@pytest.fixture(scope="module")
def answers(fake_driver):
    return run_python("tests.attention.scenario_selection", fake_driver((12, 1)), timeout=550)


@pytest.fixture(scope="module")
def native_works(answers):
    """Whether this vLLM has a path of its own for rope-free rows on 12.x."""
    release = tuple(int(part) for part in answers["version"].split("+")[0].split(".")[:2])
    return release >= (0, 31)


def case(capability, dtype, model):
    return "{}.{} {} {}".format(*capability, dtype, model)


@pytest.mark.parametrize("model", ["flat", "nested"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("capability", FAMILY)
def test_on_the_family_the_table_holds(answers, native_works, capability, dtype, model):
    answer = answers[case(capability, dtype, model)]
    assert answer["stock"].startswith(NONE if dtype == "bfloat16" else NATIVE)
    stays = dtype == "fp8_ds_mla" or (dtype == "auto" and native_works)
    assert answer["wrapped"] == (NATIVE if stays else OURS)


@pytest.mark.parametrize("model", ["flat", "nested"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c not in FAMILY])
def test_other_capabilities_are_untouched_and_nothing_is_said(answers, capability, dtype, model):
    answer = answers[case(capability, dtype, model)]
    assert answer["wrapped"] == answer["stock"]
    assert answer["said"] == []


@pytest.mark.parametrize(("dtype", "model"), [(d, m) for d in KV_DTYPES for m in ("rope", "dense")][:-1])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_other_models_are_untouched_and_nothing_is_said(answers, capability, dtype, model):
    answer = answers[case(capability, dtype, model)]
    assert answer["wrapped"] == answer["stock"]
    assert answer["said"] == []


def test_taking_the_patch_back_restores_vllm(answers):
    changed = [name for name, a in answers.items() if name != "version" and a["after"] != a["stock"]]
    assert changed == []


def test_every_decision_about_a_layer_of_ours_is_said_once_with_its_reason(answers):
    for name, answer in answers.items():
        if name == "version" or answer["wrapped"] != OURS:
            continue
        assert answer["again"] == OURS
        assert len(answer["said"]) == 1, name
        backend, reason = answer["said"][0].removeprefix("sparse_mla: ").split(": ", 1)
        assert backend in ("OVERLAY_SPARSE_MLA", OURS) and reason


def test_a_decision_for_the_native_path_is_said_too(answers):
    assert answers["12.1 fp8_ds_mla flat"]["said"] == [
        f"sparse_mla: {NATIVE}: fp8_ds_mla rows belong to vLLM's own backends"
    ]


@pytest.mark.parametrize("name", ["true auto", "true bfloat16", "topk 1024 auto", "topk 1024 bfloat16"])
def test_what_else_is_ours(answers, name):
    assert answers[name]["wrapped"] == OURS


@pytest.mark.parametrize("name", ["no flashinfer auto", "no flashinfer bfloat16"])
def test_without_flashinfer_vllm_has_no_backend_and_we_have(answers, name):
    assert answers[name]["stock"].startswith(NONE)
    assert answers[name]["wrapped"] == OURS


def test_without_flashinfer_the_reason_is_vllms_own(answers, native_works):
    if native_works:
        (line,) = answers["no flashinfer auto"]["said"]
        assert "requires FlashInfer's sparse MLA decode API" in line


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_decode_context_parallelism(answers, dtype):
    """Ours where the model's indexer merges its ranks' selections (0.32), refused by name where it does not."""
    answer = answers[f"dcp {dtype}"]
    assert answer["stock"].startswith(NONE)
    release = tuple(int(part) for part in answers["version"].split(".")[:2])
    if release >= (0, 32):
        assert answer["wrapped"] == OURS
    else:
        assert answer["wrapped"].startswith(NONE)
        assert "does not merge its selections over decode context parallel ranks" in answer["wrapped"]


@pytest.mark.parametrize("name", ["true fp8_ds_mla", "dcp fp8_ds_mla", "topk 1024 fp8_ds_mla"])
def test_fp8_ds_mla_is_never_ours(answers, name):
    assert answers[name]["wrapped"].split("\nnote:")[0] == answers[name]["stock"]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("9.0 opened bfloat16", OURS),
        ("9.0 opened true bfloat16", OURS),
        ("9.0 opened true auto", OURS),
        ("9.0 opened 10.0", "FlashInferMLASparseSM90Backend"),
        ("9.0 opened explicit sm90", "FlashInferMLASparseSM90Backend"),
    ],
)
def test_the_option_for_testing(answers, name, backend):
    assert answers[name]["stock"] == "FlashInferMLASparseSM90Backend"
    assert answers[name]["wrapped"] == backend


def test_the_option_for_testing_leaves_auto_to_a_native_path(answers, native_works):
    answer = answers["9.0 opened auto"]
    assert answer["wrapped"] == ("FlashInferMLASparseSM90Backend" if native_works else OURS)


@pytest.mark.parametrize("name", ["explicit stock fp8", "explicit stock bfloat16"])
def test_an_explicit_backend_of_vllms_wins(answers, name):
    answer = answers[name]
    assert answer["wrapped"].split("\nnote:")[0] == answer["stock"]


@pytest.mark.parametrize("name", ["explicit ours auto", "explicit ours fp8"])
def test_custom_names_our_backend(answers, name):
    assert "CUSTOM must be registered" in answers[name]["stock"]
    assert answers[name]["wrapped"] == OURS


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("explicit ours fp8_ds_mla", "kv_cache_dtype not supported"),
        ("explicit ours 9.0", "compute capability not supported"),
        ("explicit ours rope", "qk_rope_head_dim is 64"),
        ("explicit ours dense", "non-MLA not supported"),
    ],
)
def test_custom_is_refused_by_name_where_it_does_not_fit(answers, name, reason):
    assert "CUSTOM is not valid for this configuration" in answers[name]["wrapped"]
    assert reason in answers[name]["wrapped"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pcp", "PCP not supported"),
        ("rswa", "R-SWA not supported"),
        ("hisparse", "has no HiSparse path"),
        ("block size 96", "block_size not supported"),
        ("float16", "dtype not supported"),
        ("nvfp4", "nvfp4 rows belong to vLLM's own backends"),
    ],
)
def test_what_we_cannot_serve_ends_in_vllms_own_error_with_our_reason(answers, name, reason):
    answer = answers[name]
    vllms, note = answer["wrapped"].split("\nnote: ")
    assert vllms == answer["stock"]
    assert note.startswith("overlay: OVERLAY_SPARSE_MLA did not take this layer") and reason in note


def test_blocks_of_any_multiple_of_64_are_taken(answers):
    assert answers["block size 128"]["wrapped"] == OURS


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_engines_of_the_gpu_tests_would_be_one_of_each_kind(answers, name):
    """vLLM takes their arguments, and on a 9.0 opened for testing stock and wrapped part ways."""
    answer = answers[f"engine {name}"]
    assert answer["stock"] == "FlashInferMLASparseSM90Backend"
    assert answer["wrapped"] == OURS
