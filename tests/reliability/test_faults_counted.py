"""Faults and inputs are counted as they are run, and the modules that are named are there."""

import json

import pytest

from tests.conftest import ROOT
from tests.reliability import faults

MODULE = """
import pytest
from hypothesis import given, settings, strategies as st

@settings(max_examples=40, database=None, derandomize=True)
@given(st.integers())
def test_fuzz(value):
    pass

@pytest.mark.parametrize("one", [1, 2, 3])
def test_fault(one):
    assert one < 3
"""


def test_every_module_is_there():
    for files in faults.MODULES.values():
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_outcomes_and_inputs(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_some.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(faults, "MODULES", {"all": ["test_some.py"]})
    counting = faults.Counting()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_some.py"], plugins=[counting]
    )
    capsys.readouterr()
    document = json.loads(json.dumps(faults.summary(counting)))
    assert status == 1 and (document["passed"], document["failed"]) == (3, 1)
    assert document["subjects"]["all"] == {"files": ["test_some.py"], "passed": 3, "failed": 1}
    assert document["inputs_tried"] == {"test_some.py::test_fuzz": 40}
