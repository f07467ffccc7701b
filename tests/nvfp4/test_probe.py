"""`probe moe` without a GPU: every case is right with the overlay, those that it cures are wrong without it."""

import pytest


def test_the_probe_without_a_gpu(stock, wrapped):
    """Every case is right with the overlay; without it, those that it cures are wrong."""
    assert all(row["ok"] for row in wrapped["probe"]["rows"])
    assert {row["backend"] for row in wrapped["probe"]["rows"]} == {
        "FLASHINFER_CUTLASS",
        "VLLM_CUTLASS",
        "MARLIN",
        "EMULATION",
    }
    wrong = {row["checkpoint"] for row in stock["probe"]["rows"] if row["ok"] is False}
    assert {"gate and up apart", "weight-only"} <= wrong
    assert "complete" not in wrong


def test_the_probe_sees_a_planted_scale(wrapped):
    """It points the right way, which is why direction is not enough."""
    planted = [row for row in wrapped["probe planted"]["rows"] if row["quantity"] == "w2 weights"]
    assert {row["backend"] for row in planted} == {"VLLM_CUTLASS", "MARLIN"}
    for row in planted:
        assert row["ok"] is False
        assert row["cosine"] == pytest.approx(1.0)
        assert row["magnitude"] == pytest.approx(25.0)
