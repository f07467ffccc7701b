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
