"""The doctor in broken environments, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.doctor import checks, installed
from overlay.doctor.checks import Check, Surroundings, perform
from overlay.doctor.report import CHECKS
from tests.conftest import ROOT, with_overlay, without_overlay

CLEAN = without_overlay(os.environ)
OURS = with_overlay(os.environ)


def doctor(*names: str, env=OURS, cwd=ROOT, flags=()) -> tuple[int, dict[str, dict]]:
    """Exit status and results by name of `doctor --json`, of the named checks alone where there are names."""
    chosen = [part for name in names for part in ("--check", name)]
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from overlay.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, *flags, "-c", start, "doctor", "--json", *chosen]
    done = subprocess.run(line, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {result["name"]: result for result in json.loads(done.stdout)["checks"]}


def one(name: str, **how) -> tuple[int, str, str, str]:
    status, results = doctor(name, **how)
    return status, results[name]["status"], results[name]["what"], results[name]["fix"]


# --- does the overlay reach every process -----------------------------------------------------------------------------

REACH = ("sitecustomize", "one_overlay", "pythonpath", "child", "flags")


def test_a_sound_environment():
    status, results = doctor(*REACH, "chained", "config", "vllm", "patches", "versions", "cupy", "pins")
    assert status == 0
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(results, "pass")
    assert all(result["fix"] == "" for result in results.values())


def test_no_overlay_on_pythonpath():
    status, results = doctor(*REACH, env=CLEAN)
    assert status == 1
    states = {name: result["status"] for name, result in results.items()}
    assert states == {**dict.fromkeys(REACH, "fail"), "one_overlay": "pass", "flags": "pass"}
    assert f"export PYTHONPATH={ROOT}" in results["sitecustomize"]["fix"]


def test_switched_off():
    assert one("sitecustomize", env={**OURS, "OVERLAY_DISABLE": "1"})[:3] == (
        1, "fail", "OVERLAY_DISABLE=1 switches the overlay off",
    )  # fmt: skip


def test_another_sitecustomize_in_front(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    env = {**OURS, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    status, results = doctor("sitecustomize", "child", env=env)
    assert status == 1
    assert [result["status"] for result in results.values()] == ["fail", "fail"]
    assert f"{tmp_path}/sitecustomize.py, which comes before" in results["child"]["what"]


def test_the_sitecustomize_that_ours_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    env = {**OURS, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    status, results = doctor("sitecustomize", "chained", env=env)
    assert status == 0
    assert f"runs {tmp_path}/sitecustomize.py" in results["chained"]["what"]


def test_two_overlays(tmp_path):
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "declare.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text((ROOT / "sitecustomize.py").read_text())
    env = {**OURS, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    status, results = doctor("sitecustomize", "one_overlay", env=env)
    assert status == 1
    assert str(tmp_path) in results["one_overlay"]["what"]
    assert f"loaded the overlay in {tmp_path}, not this one" in results["sitecustomize"]["what"]


def test_a_link_to_this_overlay_is_no_second_one(tmp_path):
    (tmp_path / "link").symlink_to(ROOT)
    env = {**OURS, "PYTHONPATH": os.pathsep.join((str(tmp_path / "link"), str(ROOT)))}
    assert doctor("sitecustomize", "one_overlay", env=env)[0] == 0


def test_a_relative_pythonpath():
    env = {**OURS, "PYTHONPATH": ROOT.name}
    status, results = doctor("pythonpath", "child", env=env, cwd=ROOT.parent)
    assert status == 0  # sitecustomize hands an absolute one to its children
    assert results["pythonpath"]["status"] == "warn"
    assert f"relative entry '{ROOT.name}'" in results["pythonpath"]["what"]
    assert results["child"]["status"] == "pass"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_interpreter_flags(flag):
    status, results = doctor("sitecustomize", "child", "flags", flags=[flag])
    assert status == 1
    assert [result["status"] for result in results.values()] == ["fail", "fail", "fail"]
    assert flag in results["flags"]["what"]


@pytest.mark.parametrize(
    ("first", "status", "said"),
    [
        (f"#!{sys.executable} -sE", "fail", "starts Python with -sE"),
        (f"#!{sys.executable} -s", "pass", "no -I, -E or -S"),
        (f"#!{sys.executable}", "pass", "no -I, -E or -S"),
        ("#!/usr/bin/env python3", "pass", "no -I, -E or -S"),
        ("#!/nowhere/bin/python3", "warn", "is not there"),
        ("#!/usr/bin/python3 -IS", "fail", "starts Python with -IS"),
        ("#!{venv}/bin/python3", "warn", "of another Python than"),
        ("#!{venv}/bin/python3 -E", "fail", "starts Python with -E"),
        ("#!/usr/bin/env -S python3", "pass", "no -I, -E or -S"),
        ("#!/usr/bin/env -S LANG=C python3 -s -WIgnoreES", "pass", "no -I, -E or -S"),
        ("#!/usr/bin/env -S python3 -E", "fail", "starts Python with -E"),
        ("#!/usr/bin/env -S python3 -S", "fail", "starts Python with -S"),
    ],
)
def test_the_launcher(tmp_path, first, status, said):
    python = tmp_path / "my-env" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "vllm").write_text(first.replace("{venv}", str(tmp_path / "my-env")) + "\n")
    (tmp_path / "vllm").chmod(0o755)
    found = one("flags", env={**OURS, "PATH": f"{tmp_path}{os.pathsep}{OURS['PATH']}"})
    assert found[1] == status
    assert said in found[2]


# --- what is installed ------------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, version: str) -> dict[str, str]:
    """An environment in which another distribution is found first."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {**OURS, "PYTHONPATH": os.pathsep.join((OURS["PYTHONPATH"], str(folder)))}


def test_a_broken_configuration(tmp_path):
    (tmp_path / "mine.toml").write_text("[patches.sparse_mia]\nenabled = true\n")
    status, results = doctor("config", "patches", env={**OURS, "OVERLAY_CONFIG": str(tmp_path / "mine.toml")})
    assert status == 1
    assert (
        "mine.toml:1: patches.sparse_mia is not a known name; did you mean 'sparse_mla'?" in results["config"]["what"]
    )
    assert results["patches"]["status"] == "fail"


def test_two_cupy_wheels(tmp_path):
    env = distribution(tmp_path, "cupy-cuda13x", "14.2.0")
    status, state, what, fix = one("cupy", env=env)
    assert (status, state) == (1, "fail")
    assert "cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0" in what
    assert "never both" in fix


def test_an_old_wrapt(tmp_path):
    status, state, what, fix = one("versions", env=distribution(tmp_path, "wrapt", "1.16.0"))
    assert (status, state) == (1, "fail")
    assert "is too old, 2.5 brought the removal of wrappers" in what
    assert "wrapt>=2.5" in fix


def test_an_old_cupy(tmp_path):
    """13.6 cannot use the NVRTC of torch's CUDA 13 wheels, and its lack of a call shows after the weights."""
    status, state, what, fix = one("versions", env=distribution(tmp_path, "cupy-cuda12x", "13.6.0"))
    assert (status, state) == (1, "fail")
    assert "cupy-cuda12x 13.6.0 is too old, 14.2 finds the NVRTC that torch brings" in what
    assert ">=14.2,<15" in fix


def test_a_moved_pin(tmp_path):
    env = distribution(tmp_path, "nvidia-nccl-cu13", "2.29.7")
    status, state, what, fix = one("pins", env=env)
    assert (status, state) == (0, "warn")
    assert "torch requires nvidia-nccl-cu13==" in what
    assert "nvidia-nccl-cu13==2.29.7 breaks the fabric" in what
    assert "pip install 'nvidia-nccl-cu13==" in fix


def test_pins_are_those_of_the_installed_metadata(tmp_path):
    what = one("pins", env=distribution(tmp_path, "flashinfer-python", "0.6.17"))[2]
    assert "vllm requires flashinfer-python==0.7.2.post1, found flashinfer-python==0.6.17" in what


def test_another_python_without_vllm(tmp_path):
    around = Surroundings()
    around.sources = None
    assert installed.vllm(around).status == "fail"
    assert installed.patches(around).status == "fail"


# --- the kernel cache -------------------------------------------------------------------------------------------------


def test_a_kernel_cache_that_others_can_write_to(tmp_path):
    folder = tmp_path / "vllm-sparse-mla-overlay"
    folder.mkdir()
    folder.chmod(0o777)
    status, state, what, fix = one("kernel_cache", env={**OURS, "XDG_CACHE_HOME": str(tmp_path)})
    assert (status, state) == (1, "fail")
    assert "other users can write" in what
    assert fix == f"chmod 700 {folder}"
    folder.chmod(0o700)
    assert one("kernel_cache", env={**OURS, "XDG_CACHE_HOME": str(tmp_path)})[:2] == (0, "pass")


def test_a_kernel_cache_that_is_not_there_is_not_created(tmp_path):
    found = one("kernel_cache", env={**OURS, "XDG_CACHE_HOME": str(tmp_path / "new")})
    assert found[1] == "pass"
    assert "will be created" in found[2]
    assert not (tmp_path / "new").exists()


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_result():
    def broken(around):
        raise OSError("no such device")

    def dead(around):
        return checks.passed("fine")

    results = perform([Check("a", True, broken), Check("b", False, dead)], Surroundings())
    assert [(result.name, result.status) for result in results] == [("a", "fail"), ("b", "pass")]
    assert "OSError: no such device" in results[0].what


def test_the_whole_report_with_a_rehearsed_gpu(fake_driver):
    """Everything is loaded once: NVRTC, torch's libraries, the (stub) driver."""
    env = fake_driver((12, 1), overlay=True)
    line = [sys.executable, "-m", "overlay", "doctor", "--json"]
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout)
    results = {result["name"]: result for result in report["checks"]}
    assert list(results) == [check.name for check in CHECKS]
    assert set(report["fingerprint"]) == {"overlay", "packages", "libraries", "machine", "all"}
    assert "NVIDIA GB10 (sm_121)" in results["gpu"]["what"]
    assert "cuInit returned" in results["gpu"]["what"]
    assert "libnvrtc.so" in results["nvrtc"]["what"]
    assert results["nvrtc"]["status"] == "pass"
    assert "CUDA libraries" in results["libraries"]["what"]
    required = [result for result in report["checks"] if result["required"] and result["status"] == "fail"]
    assert done.returncode == (1 if required else 0)
    assert required == []


def test_an_unknown_check_is_named():
    line = [sys.executable, "-m", "overlay", "doctor", "--check", "memori"]
    done = subprocess.run(line, env=OURS, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "did you mean 'memory'" in done.stderr
