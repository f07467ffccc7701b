"""Reading Nsight Compute's report; the report itself needs a GPU."""

import shutil

import pytest

from overlay.bench import profile
from overlay.errors import OverlayError

NAMES = (
    '"ID","Kernel Name","{}","sm__inst_executed_pipe_tensor_x.avg.pct_of_peak_sustained_active","{}barrier{}","{}mio{}"'
)
UNITS = '"","","us","Ghz","%","%","%","%","inst","inst"'
REPORT = "\n".join(
    [
        "==PROF== Connected to process 1",
        "case 16 8 bf16",
        "case 16 8 bf16",
        "==PROF== Disconnected",
        NAMES.format('","'.join(profile.METRICS), *(profile.STALLED, "_per_issue_active.ratio") * 2),
        UNITS,
        '"0","sparse_mla_h8_bf16(long)","12.5","1.75","40","30","20","50","3","1"',
        '"1","merge_splits(long)","1,002.5","1.5","4","3","2","","0","0.5"',
    ]
)


def test_a_report_becomes_a_row_for_each_kernel():
    first, second = profile.parse(REPORT)
    assert first == {
        "kernel": "sparse_mla_h8_bf16",
        "heads": 16,
        "tokens": 8,
        "kv_dtype": "bf16",
        "us": 12.5,
        "clock_ghz": 1.75,
        "tensor_percent": 50.0,
        "issue_percent": 40.0,
        "shared_percent": 30.0,
        "l2_percent": 20.0,
        "stalls_percent": {"barrier": 75.0, "mio": 25.0},
    }
    assert (second["us"], second["tensor_percent"], second["stalls_percent"]) == (1002.5, None, {"mio": 100.0})
    headers, rows = profile.cells([first, second])
    assert all(len(row) == len(headers) for row in rows)
    assert [row[headers.index("KV")] for row in profile.cells([first, {**first, "kv_dtype": "fp8"}])[1]] == [
        "bf16",
        "fp8",
    ]


@pytest.mark.parametrize(
    ("script", "message"), [("sleep 60", "not through within"), ("echo no; exit 3", "ends with 3: no")]
)
def test_a_tool_that_hangs_or_fails(monkeypatch, tmp_path, script, message):
    tool = tmp_path / "ncu"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(profile, "TIME_S", 1)
    with pytest.raises(OverlayError, match=message):
        profile.rows((8,), (1,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "no kernel: .*ERR_NVGPUCTRPERM"),
        (REPORT.replace("case 16 8 bf16\ncase", "case"), "2 kernels where 1"),
        (REPORT.replace('"us"', '"fortnight"'), "in 'fortnight'"),
    ],
)
def test_a_report_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(OverlayError, match=message):
        list(profile.parse(text))


def test_without_nsight_compute(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(profile.Path, "exists", lambda path: False)
    with pytest.raises(OverlayError, match="Nsight Compute"):
        profile.rows()
