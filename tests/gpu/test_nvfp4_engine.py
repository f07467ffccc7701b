"""NVFP4 on a real GPU: engines on checkpoints with missing and bad scales, and the experts of every backend.

Slow (minutes: eleven engines and two probes at once). `python -m tests.gpu.nvfp4_engine` is the engines alone.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu.nvfp4_engine import compare_engines  # noqa: E402

pytestmark = pytest.mark.gpu

PROBE = ("overlay", "probe", "moe", "--json", "--timeout", "300")


@pytest.fixture(scope="module")
def outcome():
    return compare_engines({"probe": (*PROBE, "--keep"), "planted": (*PROBE, "--plant", "inverted")})


@pytest.fixture(scope="module")
def engines(outcome):
    return outcome[0]["engines"]


STOCK = ("stock", "one bad, stock", "linears, stock")
WITH_OVERLAY = ("overlay", "re-routed", "one bad, repaired", "linears, re-routed")


@pytest.mark.parametrize("name", STOCK)
def test_stock_computes_something_else(engines, name):
    assert "error" not in engines[name], engines[name]["error"]
    assert engines[name]["problems"]
    assert engines[name]["log"] == []


@pytest.mark.parametrize("name", WITH_OVERLAY)
def test_the_overlay_answers_as_the_weights_say(engines, name):
    """Same greedy tokens where the reference's best two are apart by more than noise; log-probabilities within 0.05."""
    assert engines[name]["problems"] == []
    assert engines[name]["largest"] <= 0.05


@pytest.mark.parametrize("name", WITH_OVERLAY)
def test_enough_was_compared(engines, name):
    assert engines[name]["prompt_tokens"] == 6 + 63 + 500 + 2046
    assert engines[name]["tokens"] >= 4 * 12


def test_the_engines_computed_what_they_are_compared_for(engines):
    """Stock quantised activations. The overlay moved the layers that did to 16-bit ones, or gave them a scale."""
    experts = {name: set(engines[name]["experts"].values()) for name in (*STOCK, *WITH_OVERLAY)}
    assert experts["stock"] == experts["one bad, stock"] == experts["one bad, repaired"] == {"EMULATION"}
    assert experts["overlay"] | experts["re-routed"] <= {"MARLIN", "HUMMING"}
    linears = {name: set(engines[name]["linears"].values()) for name in ("linears, stock", "linears, re-routed")}
    assert linears["linears, stock"] == {"EmulationNvFp4LinearKernel"}
    assert linears["linears, re-routed"] <= {"MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel"}


def test_the_overlay_says_what_it_did(engines):
    said = {name: "\n".join(engines[name]["log"]) for name in WITH_OVERLAY}
    assert "layers 1-3: no usable value in w13_input_scale and w2_input_scale; routed to W4A16" in said["re-routed"]
    assert "instead of EMULATION" in said["re-routed"]
    assert "experts 2; repaired by the maximum of the layer's valid scales" in said["one bad, repaired"]
    assert "no usable value in input_scale; routed to W4A16" in said["linears, re-routed"]


def test_the_flag_is_refused_by_name(engines):
    assert "--moe-backend emulation quantises activations" in engines["refused"]["error"]


def document(said: str) -> dict:
    """The JSON that a probe printed, among whatever its log also has."""
    start = said.find("{\n")
    assert start >= 0, said[-3000:]
    return json.JSONDecoder().raw_decode(said[start:])[0]


def test_the_experts_compute_what_they_should(outcome):
    found = document(outcome[1]["probe"])
    assert found["gpu"] is True
    assert found["ok"], [found["broken"], *(row for row in found["rows"] if row["ok"] is False)]
    measured = {(row["checkpoint"], row["backend"]) for row in found["rows"] if row["ok"]}
    assert {("complete", "MARLIN"), ("complete", "EMULATION"), ("one dead expert", "EMULATION")} <= measured
    assert ("weight-only", "MARLIN") in measured  # re-routed by the overlay, converted and run


def test_a_planted_inverted_scale_is_seen(outcome):
    found = document(outcome[1]["planted"])
    outputs = [row for row in found["rows"] if row["quantity"] == "output"]
    assert not found["ok"] and outputs
    for row in outputs:
        assert row["ok"] is False
        assert row["magnitude"] == pytest.approx(25, rel=0.2)
        assert row["cosine"] > 0.95
