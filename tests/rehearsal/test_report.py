"""Columns as text and findings, without vLLM."""

from typing import Any

import pytest

from overlay.rehearsal import report

STOCK: dict[str, Any] = {
    **{"boots": True, "failure": None, "log": [], "patches": [], "vllm": "0.33.0", "rope_free": True},
    **{"attention_backend": "FLASHINFER_MLA_SPARSE_SM120", "kv_cache_dtype": "fp8_ds_mla", "row_bytes": 656},
    **{"kv_cache_dtype_asked": "fp8", "bytes_per_block": 33_251_328, "kv_tokens": 1000, "kv_memory": 24 << 30},
}
OVERLAY = {
    **STOCK,
    **{"attention_backend": "OVERLAY_SPARSE_MLA", "kv_cache_dtype": "fp8", "row_bytes": 512},
    **{"bytes_per_block": 26_104_320, "kv_tokens": 1270},
    "patches": [{"id": "sparse_mla", "state": "active", "reason": "because"}],
}


def failed(column: dict[str, Any], stage: str, said: str) -> dict[str, Any]:
    return {**column, "boots": False, "failure": {"stage": stage, "error": said}}


def by_check(stock: dict, overlay: dict) -> dict[str, Any]:
    return {finding.check: finding for finding in report.findings(stock, overlay)}


def test_the_silent_rewrite_and_the_capacity() -> None:
    found = by_check(STOCK, OVERLAY)
    assert set(found) == {"kv_cache_rewritten", "kv_capacity"}
    assert "silently stores fp8_ds_mla rows where fp8 was asked for" in found["kv_cache_rewritten"].what
    assert "+27%" in found["kv_capacity"].what
    assert found["kv_capacity"].consequence == "26,104,320 against 33,251,328 bytes a block"
    more = by_check(STOCK, {**OVERLAY, "kv_memory": 26 << 30})["kv_capacity"]
    assert more.consequence.endswith("bytes a block, in 26.00 against 24.00 GiB")


def test_no_rewrite_where_it_was_asked_for() -> None:
    asked = {**STOCK, "kv_cache_dtype_asked": "fp8_ds_mla"}
    assert by_check(asked, asked) == {}


def test_the_overlay_is_no_cure_for_a_model_with_rope() -> None:
    roped = {**STOCK, "rope_free": False}
    assert by_check(roped, roped)["kv_cache_rewritten"].cure.startswith("none")


def test_a_stock_column_that_ends() -> None:
    found = by_check(failed(STOCK, "the model", "ValueError: No valid attention backend"), OVERLAY)
    assert found["stock_boot"].severity == "warning"
    assert "at the model: ValueError: No valid attention backend" in found["stock_boot"].what


def test_what_stock_says_too_is_not_for_the_overlay_to_cure() -> None:
    both = failed(STOCK, "vLLM's configuration", "bad flag"), failed(OVERLAY, "vLLM's configuration", "bad flag")
    assert "without the overlay says the same" in by_check(*both)["overlay_boot"].cure


def test_refusals_are_not_told_twice() -> None:
    said = "ValueError: No valid attention backend found for cuda. Reasons: {TRITON_MLA: [sparse not supported]}."
    column = failed(STOCK, "the model", said)
    selection = {"head_size": 512, "kv_cache_dtype": "bfloat16", "chosen": None}
    refused = {**selection, "refused": {"TRITON_MLA": ["sparse not supported"]}}
    assert report.why("stock", {**column, "selections": [refused]}).count("sparse not supported") == 1
    assert "sparse not supported" in report.why("stock", {**column, "selections": [{**selection, "refused": {}}]})


def test_what_the_shards_hold_stands_beside_what_vllm_builds() -> None:
    built = {**OVERLAY, "weight_bytes": 89 << 30, "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    (finding,) = report.stored(180 << 30, built)
    assert "180.00 GiB by their headers" in finding.what and "weights of 89.00 GiB on each of 2 ranks" in finding.what
    assert report.stored(180 << 30, OVERLAY) == []


def test_an_overlay_column_that_ends_is_the_error() -> None:
    both = (
        failed(STOCK, "the model", "ValueError: a"),
        failed(OVERLAY, "the KV cache plan", "ValueError: " + "x " * 500),
    )
    found = by_check(*both)
    assert "stock_boot" not in found and found["overlay_boot"].severity == "error"
    assert "the KV cache plan" in found["overlay_boot"].what and len(found["overlay_boot"].what) < 300


@pytest.mark.parametrize(("left", "cure"), [(-1, "more GPUs"), (5, "see the message")])
def test_a_lack_of_memory_has_its_own_cure(left: int, cure: str) -> None:
    column = {**failed(OVERLAY, "the KV cache plan", "no memory"), "budget": {"kv_cache": left}}
    assert by_check(STOCK, column)["overlay_boot"].cure.startswith(cure)


def test_pipeline_stages_are_said_to_be_one_of_several() -> None:
    assert (
        "first of 3 pipeline stages" in by_check(STOCK, {**OVERLAY, "pipeline_parallel_size": 3})["pipeline_stage"].what
    )


def test_text_has_every_part_and_no_line_without_a_fact() -> None:
    gib = report.GIB
    budget = {"memory": 100 * gib, "utilization": 0.9, "weights": 60 * gib, "buffers": gib // 2}
    budget |= {"prefill_workspace": 0, "allowance": 3 * gib, "kv_cache": int(26.5 * gib)}
    selection = {"head_size": 512, "kv_cache_dtype": "fp8", "chosen": "OURS", "refused": {"TRITON_MLA": ["a", "b"]}}
    column = {**OVERLAY, "budget": budget, "selections": [selection], "log": ["sparse_mla: rows"]}
    text = report.as_text({"stock": STOCK, "overlay": column}, report.findings(STOCK, column))
    assert "head size 512, KV fp8: OURS" in text and "TRITON_MLA refused: a; b" in text
    assert "sparse_mla: rows" in text and "sparse_mla  active" in text
    joined = " ".join(text.split())
    assert "100.00 GiB x gpu_memory_utilization 0.9 - 60.00 (weights) - 0.50 (buffers of the built model)" in joined
    assert "= 26.50 GiB for the KV cache" in joined
    assert "dense prefill" not in text and "MoE backend" not in text
    assert "fp8_ds_mla (asked: fp8)" in text


def test_a_column_that_knows_nothing_can_be_printed() -> None:
    nothing = failed({"log": [], "patches": []}, "importing vLLM", "OverlayError: patch sparse_mla is wanted")
    text = report.as_text({"stock": STOCK, "overlay": nothing}, report.findings(STOCK, nothing))
    assert "NO, at importing vLLM" in text and "patch sparse_mla is wanted" in text


def test_json_is_columns_and_findings() -> None:
    shape = report.as_json({"stock": STOCK, "overlay": OVERLAY}, report.findings(STOCK, OVERLAY))
    assert shape["stock"] is STOCK and shape["overlay"] is OVERLAY
    assert set(shape["findings"][0]) == {"check", "severity", "what", "consequence", "cure"}
