"""`probe moe` and what the demo shows: how their children's answers are read and judged."""

import json
import sys

import pytest

from overlay import cli
from overlay.commands import probe
from overlay.nvfp4 import show
from tests.conftest import ROOT

GOOD = {"checkpoint": "complete", "flag": "auto", "quantity": "output", "cosine": 0.9999, "magnitude": 1.0, "ok": True}
WRONG = {**GOOD, "magnitude": 25.0, "ok": False, "reason": ""}
MISSING = {**GOOD, "flag": "b12x", "backend": "", "cosine": None, "magnitude": None, "ok": None, "reason": "not here"}


def row(backend: str, base: dict = GOOD) -> dict:
    return {"reason": "", **base, "backend": backend}


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([row("MARLIN"), row("EMULATION"), MISSING], 0),
        ([row("MARLIN"), row("EMULATION"), row("HUMMING", WRONG)], 1),
        ([row("MARLIN"), MISSING], 1),  # every GPU has both
        ([], 1),
    ],
)
def test_verdict(monkeypatch, capsys, rows, status):
    monkeypatch.setattr(probe, "ask", lambda *question: (rows, ""))
    assert cli.main(["probe", "moe", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["rows"]) == (status == 0, rows)
    assert cli.main(["probe", "moe"]) == status
    said = capsys.readouterr().out
    assert ("all of them compute what they should" in said) == (status == 0)
    if MISSING in rows:
        assert "b12x (complete): not here" in said
    if status and rows and rows[-1]["ok"] is False:
        assert "25" in said and "WRONG" in said


def test_a_probe_that_dies_says_why(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(probe.Hardware, "capability", (12, 1))
    assert cli.main(["probe", "moe"]) == 2
    assert "the experts could not be driven" in capsys.readouterr().err


ANSWERING_CHILD = """
import json, os, sys
stock = os.environ.get("OVERLAY_DISABLE") == "1"
layer = {"method": "M", "backend": "CUTLASS" if stock else "MARLIN"}
layer["g1_alphas"] = [0.0, float("nan")] if stock else [0.02, 0.02]
layer["a1_gscale"] = [float("inf")] if stock else None
print("noise")
print(json.dumps({"experts": {sys.argv[1][-4:]: layer}, "log": [] if stock else ["WARNING: routed to W4A16"]}))
"""


def test_stock_beside_the_overlay(monkeypatch, tmp_path):
    """Two children, of which one has the kill switch; the text shows both, and the overlay's reasons."""
    (tmp_path / "child.py").write_text(ANSWERING_CHILD)
    monkeypatch.setattr(show, "CHILD", "child")
    monkeypatch.setattr(show.driver, "environment", lambda capability: {"PYTHONPATH": str(tmp_path), "PATH": "/bin"})
    outcomes = show.compare(tmp_path / "tiny")
    assert outcomes["stock"]["log"] == []
    lines = show.as_text(outcomes).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["tiny", "stock", "CUTLASS", "0", "to", "nan", "inf"],
        ["tiny", "overlay", "MARLIN", "0.02", "not", "quantised"],
    ]
    assert lines[-1] == "routed to W4A16"


def test_a_checkpoint_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "child.py").write_text("raise SystemExit('no such tensor')\n")
    monkeypatch.setattr(show, "CHILD", "child")
    monkeypatch.setattr(show.driver, "environment", lambda capability: {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(show.ShowError, match="stock vLLM could not load it:\nno such tensor"):
        show.compare(ROOT)
