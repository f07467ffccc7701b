"""Cases in a process apart: what a crash, an exception and a hang cost."""

import json
import sys

import pytest

from overlay.probe import apart

CHILD = """
import json, os, sys, time
from pathlib import Path
from overlay.probe import apart

out, plan, first = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[4])
for case, what in enumerate(plan[first:], first):
    apart.begin(out, case)
    if what == "crash":
        os.abort()
    if what == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if what == "hang":
        time.sleep(600)
    with out.open("a") as rows:
        print(json.dumps({"case": case, "pid": os.getpid()}), file=rows)
"""


def drive(tmp_path, plan: list[str], seconds: float = 60.0, child: str = CHILD) -> list[dict]:
    out = tmp_path / "rows"
    command = [sys.executable, "-c", child, str(out), json.dumps(plan)]
    apart.run(command, out, len(plan), seconds, lambda case, reason: {"case": case, "reason": reason})
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_one_process_runs_all_that_goes_well(tmp_path):
    rows = drive(tmp_path, ["well"] * 3)
    assert [row["case"] for row in rows] == [0, 1, 2]
    assert len({row["pid"] for row in rows}) == 1


def test_a_case_costs_itself(tmp_path):
    rows = drive(tmp_path, ["well", "crash", "well", "raise", "raise", "well"])
    assert [row["case"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert "signal 6" in rows[1]["reason"]
    assert rows[3]["reason"].endswith("exit 1: RuntimeError: CUDA error: an illegal memory access was encountered")
    assert len({row["pid"] for row in rows if "pid" in row}) == 3


def test_the_last_case_too(tmp_path):
    assert [row["case"] for row in drive(tmp_path, ["crash"])] == [0]


def test_a_case_that_hangs_is_ended(tmp_path):
    rows = drive(tmp_path, ["hang", "well"], seconds=1.0)
    assert rows[0]["reason"] == "no answer within 1 s"
    assert rows[1]["case"] == 1


def test_a_child_that_does_not_start_is_not_started_again(tmp_path):
    with pytest.raises(SystemExit, match="ModuleNotFoundError: No module named 'nothing'"):
        drive(tmp_path, ["well"] * 3, child="import nothing")
    assert not (tmp_path / "rows").exists()


def test_a_command_line_of_its_own_is_asked_for_the_rest(tmp_path):
    """What `--first` means is the child's business; it is told where to begin."""
    child = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text(repr(sys.argv[2:]))"
    out = tmp_path / "rows"
    apart.run([sys.executable, "-c", child, str(out)], out, 1, 60.0, lambda case, reason: {})
    assert out.read_text() == "['--first', '0']"
