"""NVFP4 on a real GPU: engines on a weight-only checkpoint, and the experts of every backend this GPU can run.

Slow (minutes: four engines at once, then two probes). `python -m tests.gpu.nvfp4_engine` is the first half.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from overlay import cli  # noqa: E402
from tests.gpu.nvfp4_engine import compare_engines  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def report():
    return compare_engines()


def test_stock_computes_something_else(report):
    """Read with emulation, which quantises activations with scales that nobody loaded."""
    assert report["stock"]["problems"]
    assert set(report["stock"]["experts"].values()) == {"EMULATION"}


def test_the_overlay_answers_as_the_twin_does(report):
    """Same greedy tokens where the twin's best two are further apart than the noise; log-probabilities within 0.05."""
    assert report["overlay"]["problems"] == []
    assert report["overlay"]["largest"] <= report["tolerance"]
    assert set(report["overlay"]["experts"].values()) <= {"MARLIN", "HUMMING"}


def test_enough_was_compared(report):
    assert report["overlay"]["prompt_tokens"] == 6 + 63 + 500 + 2046
    assert report["overlay"]["tokens"] >= 4 * 12


def test_the_flag_is_refused_by_name(report):
    assert "--moe-backend emulation quantises activations" in report["refused"]


def probe(capsys, *arguments: str) -> tuple[int, dict]:
    status = cli.main(["probe", "moe", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_the_experts_compute_what_they_should(capsys):
    status, document = probe(capsys, "--keep")
    assert document["gpu"] is True
    assert status == 0, [row for row in document["rows"] if row["ok"] is False]
    measured = {(row["checkpoint"], row["backend"]) for row in document["rows"] if row["ok"]}
    assert {("complete", "MARLIN"), ("complete", "EMULATION"), ("one dead expert", "EMULATION")} <= measured
    assert ("weight-only", "MARLIN") in measured  # re-routed by the overlay, converted and run


def test_a_planted_inverted_scale_is_seen(capsys):
    status, document = probe(capsys, "--plant", "inverted")
    assert status == 1
    for row in document["rows"]:
        if row["quantity"] == "output":
            assert row["ok"] is False
            assert row["magnitude"] == pytest.approx(25, rel=0.2)
            assert row["cosine"] > 0.95
