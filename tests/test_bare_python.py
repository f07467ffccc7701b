"""Every command in a Python that has nothing installed: an answer, or one line that says what is missing."""

import json
import subprocess
import venv
from pathlib import Path

import pytest

from overlay.recipes.check import GEOMETRY
from tests.checkpoint import small
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("with a space") / "model", small.config(), small.plain("lm_head"))


def run(python: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [python, "-m", "overlay", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


NEEDS_VLLM = {
    "status": ["status", "--json"],
    "rehearse": ["rehearse", "--model", GEOMETRY, "--capability", "12.1", "--json"],
    "recipe": ["recipe", "gb10-x2", "--check", "--json"],
    "accept": ["accept", "--url", "http://127.0.0.1:9"],
    "tiny": ["tiny", "/nowhere"],
    "compile": ["compile", "--json"],
    "bench": ["bench"],
}


@pytest.mark.parametrize("name", NEEDS_VLLM)
def test_what_is_missing_is_said_in_a_line(python, name):
    done = run(python, *NEEDS_VLLM[name])
    assert done.returncode == 2, done
    assert done.stderr.startswith("overlay: ") and "Traceback" not in done.stderr
    if "--json" in NEEDS_VLLM[name]:
        assert json.loads(done.stdout)["error"] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe"], "rtx-5090-x8"),
        (["recipe", "gb10-x4"], "vllm serve"),
        (["explain", "sparse_mla"], "why:"),
        (["explain"], "sparse_mla          no attention path"),
        (["explain", "--json"], '"id": "rope_pad"'),
        (["status", "--live"], ""),
    ],
)
def test_what_needs_nothing_works(python, arguments, said):
    done = run(python, *arguments)
    assert "Traceback" not in done.stderr
    assert said in done.stdout + done.stderr


def test_an_unquantised_checkpoint_is_audited_without_torch(python, checkpoint):
    done = run(python, "audit", checkpoint)
    assert "output head" in done.stdout, done.stderr


def test_the_doctor_finds_what_is_missing_and_no_check_of_its_own_breaks(python):
    done = run(python, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert {"vllm", "versions"} <= {name for name, check in checks.items() if check["status"] == "fail"}
    assert [name for name, check in checks.items() if "the check itself failed" in check["what"]] == []
    assert checks["pins"]["status"] == checks["boot"]["status"] == "warn"
