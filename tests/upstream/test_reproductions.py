"""The reports under docs/upstream: each reproduction shows its fault on the installed, stock vLLM, without a GPU."""

import math
import os
import re

import pytest

from tests.conftest import ROOT, run_python, without_overlay

FOLDER = ROOT / "docs" / "upstream"
SCRIPTS = sorted(FOLDER.glob("*.py"))

ALL = """
import contextlib, io, json, runpy, sys
answers = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = runpy.run_path(path, run_name="__main__")["result"]
    answers[path] = {**result, "said": said.getvalue()}
print(json.dumps({"answers": answers, "overlay": "overlay.startup" in sys.modules}))
"""


@pytest.fixture(scope="module")
def shown() -> dict[str, dict]:
    """Script name -> its answer and what it printed ("said"), all from one process in which vLLM is stock."""
    env = {**without_overlay(os.environ), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = run_python(ALL, env, *map(str, SCRIPTS), timeout=600)
    assert found["overlay"] is False
    return {path.rpartition("/")[2]: answer for path, answer in found["answers"].items()}


def test_every_fault_is_still_there(shown):
    """When one of these fails, vLLM has cured it: take the report away and see which patch can go with it."""
    assert {name: bool(answer["wrong"]) for name, answer in shown.items()} == {path.name: True for path in SCRIPTS}


def test_the_spelling_that_vllm_knows_is_the_control(shown):
    answer = shown["nvfp4_config_shapes.py"]
    (control,) = (name for name in answer["resolved"] if "control" in name)
    assert answer["resolved"][control] == "W4A16_NVFP4"
    assert len(answer["wrong"]) == 8


def test_one_unloaded_scale_in_a_layer_is_enough(shown):
    rms = shown["unchecked_scales.py"]["rms"]
    assert rms["every scale loaded"] == pytest.approx(1, abs=0.1)
    assert rms["no scale loaded, memory holds zero"] == 0
    assert rms["expert 2 of 4 not loaded, memory holds 1e30"] == 0
    assert math.isnan(rms["expert 2 of 4 not loaded, memory holds nan"])


def test_a_garbage_pool_becomes_four_garbage_tokens(shown):
    assert shown["pool_ids.py"]["wrong"] == [4_000_000, 4_000_001, 4_000_002, 4_000_003]


def test_the_profile_run_asks_for_the_dense_prefill_of_a_layer_without_one(shown):
    answer = shown["profile_memory.py"]
    assert answer["profile"] == (64 * 1024 + 4096) * 32 * 512 * 2
    assert answer["real"] < answer["profile"] / 30


def test_the_import_error_is_not_told(shown):
    answer = shown["swallowed_import_error.py"]
    assert (answer["answer"], answer["told"], answer["wrong"]) == (False, False, ["the cause is lost"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_report_shows_what_the_script_prints(shown, script):
    quoted = re.search(r"\*\*Reproduction\.\*\*.*?```\n(.*?)```", script.with_suffix(".md").read_text(), re.S)[1]
    printed = shown[script.name]["said"]
    assert [line for line in quoted.splitlines() if line not in printed] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_has_its_report(script):
    report = script.with_suffix(".md").read_text()
    assert f"python {script.name}" in report
    assert re.match(r"# \S", report)
    assert "vLLM 0.33.0" in report
    assert script.stem in (FOLDER / "README.md").read_text()
