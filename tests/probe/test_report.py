"""`probe attention` and `probe indexer`: how their children's rows are read, told and judged."""

import json
import sys

import pytest

from overlay import cli
from overlay.commands import probe
from overlay.probe import report

ATTENTION = {"backend": "A", "kv_cache_dtype": "fp8", "index_rows": "as selected", "tokens": 64, "cosine": 0.99999,
             "magnitude": 1.0001, "ok": True, "required": True, "reason": ""}  # fmt: skip
INDEXER = {"step": "decode", "kernel": "auto", "case": "short rows", "rows": 33, "wrong": 0, "ok": True,
           "required": True, "reason": ""}  # fmt: skip
BAD = {"ok": False, "reason": "magnitude", "magnitude": 2.7}
NOT_ASKED = {"ok": False, "required": False, "reason": "direction"}
ABSENT = {"ok": None, "cosine": None, "magnitude": None, "reason": "not on this GPU"}


def asked(monkeypatch, capsys, name: str, rows: list[dict], broken: str = "") -> tuple[int, str, dict]:
    monkeypatch.setattr(probe, "ask", lambda *question: (rows, broken))
    status = cli.main(["probe", name])
    text = capsys.readouterr().out
    assert cli.main(["probe", name, "--json"]) == status
    return status, text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ([{}], 0, "all of them compute what they should"),
        ([{}, BAD], 1, "WRONG magnitude"),
        ([{}, NOT_ASKED], 0, "differs direction"),
        ([NOT_ASKED], 1, "nothing was measured"),
        ([{}, ABSENT], 0, "A (fp8): not on this GPU"),
        ([ABSENT], 1, "nothing was measured"),
        ([], 1, "nothing was measured"),
    ],
)
def test_attention(monkeypatch, capsys, changes, status, said):
    rows = [{**ATTENTION, **change} for change in changes]
    found, text, document = asked(monkeypatch, capsys, "attention", rows)
    assert (found, document["ok"], document["rows"]) == (status, status == 0, rows)
    assert said in text


@pytest.mark.parametrize("name", ["attention", "indexer"])
def test_what_was_measured_before_a_crash_is_shown_and_is_no_success(monkeypatch, capsys, name):
    row = {"attention": ATTENTION, "indexer": INDEXER}[name]
    status, text, document = asked(monkeypatch, capsys, name, [row], "illegal memory access")
    assert status == 1 and document["ok"] is False and document["broken"] == "illegal memory access"
    assert "NOT THROUGH: illegal memory access" in text and ("auto" in text or "as selected" in text)


def test_indexer(monkeypatch, capsys):
    wrong = {**INDEXER, "kernel": "persistent", "wrong": 7, "ok": False, "required": False}
    status, text, _ = asked(monkeypatch, capsys, "indexer", [INDEXER, wrong])
    assert status == 0
    assert [line.split()[-2:] for line in text.splitlines() if "short rows" in line] == [["0", "ok"], ["7", "differs"]]
    assert asked(monkeypatch, capsys, "indexer", [{**wrong, "required": True}, INDEXER])[0] == 1


def test_one_line_for_all_sizes_of_a_backend_with_the_worst_of_each_number():
    rows = [
        {**ATTENTION, "tokens": 1, "cosine": 0.99995, "magnitude": 1.001},
        {**ATTENTION, "tokens": 4096, "cosine": 0.99999, "magnitude": 0.995},
        {**ATTENTION, "tokens": 2, "cosine": None, "magnitude": None},
        {**ATTENTION, "tokens": 64, **BAD},
    ]
    assert report.attention_lines(rows) == [
        ("A", "fp8", "as selected", "3 of 1 to 4096", "0.99995", "0.995", "ok"),
        ("A", "fp8", "as selected", 64, "0.99999", "2.7", "WRONG magnitude"),
    ]


CHILD = """
import json, sys, time
print(json.dumps({{"ok": True}}), file=open(sys.argv[sys.argv.index("--out") + 1], "w"), flush=True)
{}
"""


@pytest.mark.parametrize(
    ("end", "broken"),
    [
        ("", ""),
        ("sys.exit('no memory')", "no memory"),
        ("sys.stderr.write('compiling'); sys.stderr.flush(); time.sleep(60)", "not through within 3 s\ncompiling"),
    ],
)
def test_a_child_that_fails_or_hangs_leaves_its_rows(monkeypatch, tmp_path, end, broken):
    child = tmp_path / "overlay_child.py"
    child.write_text(CHILD.format(end))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {child} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(script))
    assert probe.ask("indexer", True, {}, 3.0) == ([{"ok": True}], broken)


def test_a_child_without_rows_says_why(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(probe.Hardware, "capability", (12, 1))
    assert cli.main(["probe", "indexer"]) == 2
    assert "the indexer's top-k could not be driven:\nexit 1" in capsys.readouterr().err
