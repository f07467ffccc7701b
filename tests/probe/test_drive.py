"""The probes' own driving of vLLM's real layers and dispatchers, as far as it goes without a GPU."""

import pytest

from overlay.probe.attention import KV_CACHE_DTYPES, OURS, limits
from overlay.probe.batches import KINDS
from overlay.sources import VllmSources
from tests.conftest import run_python

if not VllmSources.find().has("vllm.models.glm5next"):
    pytest.skip("this vLLM has no rope-free sparse-MLA model", allow_module_level=True)


@pytest.fixture(scope="module")
def seen(fake_driver):
    return run_python("tests.probe.scenario", fake_driver((12, 1), overlay=True), timeout=600)


def ours(rows):
    return [row for row in rows if row["backend"] == OURS and row["kv_cache_dtype"] != "fp8_ds_mla"]


def test_every_batch_of_ours_is_right(seen):
    rows = ours(seen["measured"])
    asked = [(row["kv_cache_dtype"], row["tokens"], row["index_rows"]) for row in rows]
    assert asked == [(dtype, tokens, kind) for dtype in ("bfloat16", "fp8") for tokens in (1, 5) for kind in KINDS]
    assert all(row["ok"] and row["required"] for row in rows)
    assert all(row["cosine"] > 0.9999 for row in rows if row["cosine"] is not None)


def test_five_percent_are_seen_wherever_something_is_attended_to(seen):
    rows = ours(seen["louder"])
    assert len(rows) == 12
    for row in rows:
        nothing = row["cosine"] is None
        assert row["ok"] is nothing and row["reason"] == ("" if nothing else "magnitude")


def test_a_backend_that_raises_is_wrong_and_asked_no_more(seen):
    assert [(row["kv_cache_dtype"], row["ok"], row["reason"]) for row in ours(seen["raising"])] == [
        (dtype, False, "RuntimeError: no kernel image is available") for dtype in ("bfloat16", "fp8")
    ]


def test_vllms_own_reasons_are_given(seen):
    reasons = {(row["backend"], row["kv_cache_dtype"]): row["reason"] for row in seen["offered"]}
    assert all(row["ok"] is None for row in seen["offered"])
    assert {dtype for _, dtype in reasons} == set(KV_CACHE_DTYPES)
    assert "offers" in reasons[OURS, "bfloat16"] and "offers" in reasons["FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla"]
    assert reasons[OURS, "fp8_ds_mla"] == "kv_cache_dtype not supported"
    assert "compute capability not supported" in reasons["FLASHMLA_SPARSE", "bfloat16"]


def test_a_dtype_that_vllm_rewrites_is_not_measured_under_its_old_name(seen):
    (row,) = [
        r for r in seen["measured"] if r["backend"] == "FLASHINFER_MLA_SPARSE_SM120" and r["kv_cache_dtype"] == "fp8"
    ]
    assert (row["ok"], row["reason"]) == (None, "vLLM stores fp8_ds_mla where fp8 is asked for")


def test_the_indexers_torch_variant_is_right_and_a_refused_one_says_why(seen):
    rows = seen["indexer"]
    torch_rows = [row for row in rows if row["kernel"] == "torch"]
    assert len(torch_rows) == 12 and all(row["ok"] for row in torch_rows)
    (refused,) = [row for row in rows if row["kernel"] == "deep_select"]
    assert refused["ok"] is None and "requires SM100a" in refused["reason"]


def test_only_vllms_own_kernels_may_round_to_fp8():
    strict, loose = limits(OURS, "bfloat16"), limits("ANOTHER", "fp8")
    assert strict[0] > loose[0] and strict[1] < loose[1]
    assert limits(OURS, "fp8") == limits("ANOTHER", "bfloat16") == strict
    assert limits("ANOTHER", "fp8_ds_mla") == loose
