"""The comparison of engines runs what it says it ran, on the machine it names; its children are stand-ins."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import engine_compare, jobs
from tests.gpu.engine_cases import BY_NAME, CASES

NAMES = [case.name for case in CASES]
THERE = {
    "gpu": "NVIDIA H200", "capability": "9.0", "commit": "abc", "date": "2026-01-01", "driver": "580.95",
    "versions": {"torch": "2.14.0", "flashinfer-python": "0.7.2", "cupy-cuda13x": "14.2.0", "vllm": "0.33.0"},
}  # fmt: skip


def answers() -> list[dict]:
    return [{"tokens": [5, 6], "logprobs": [-0.5, -1.0], "margins": [1.0, 0.5], "prompt_logprobs": [-3.0] * 9}]


def written(side: str, name: str) -> dict:
    """What the child of one side writes for one case when all is well."""
    backend = "OVERLAY_SPARSE_MLA" if side == "ours" else "FLASHINFER_MLA_SPARSE_SM90"
    layer = {"backend": backend, "kv_cache_dtype": "bfloat16", "cache_shape": [], "cache_strides": [], "heads": 16}
    result = {"case": name, "side": side, "layers": [layer], "graph_mode": "NONE", "answers": answers(), "seconds": {}}
    if side == "stock":
        return {**result, "again": answers()}
    zeroed = [{**answers()[0], "logprobs": [-9.0, -9.0]}]
    return {**result, "zeroed": zeroed} if BY_NAME[name].control else result


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`compare_engines` on a machine that `there` describes; `started` has the children's commands."""
    there, started, kept, lost = dict(THERE), [], {}, {}
    monkeypatch.setattr(engine_compare, "machine", lambda: dict(there))
    monkeypatch.setattr(engine_compare, "write_checkpoint", lambda case, work: None)
    monkeypatch.setattr(engine_compare.measurement, "keep", lambda name, document: kept.update({name: document}))
    monkeypatch.setattr(engine_compare, "ROOT", tmp_path)
    monkeypatch.setattr(jobs, "gpus", lambda: ("3", "4"))
    monkeypatch.setattr(jobs, "room", lambda: 3)

    def run(todo, at_once, seconds, **options):
        for job in todo:
            _, side, _, out, *names = job.command
            assert (Path(out) / engine_compare.PROVENANCE).exists(), "whose answers come is said before they do"
            started.append(job)
            for name in names if job.name not in lost else ():
                (Path(out) / f"{side}-{name}.json").write_text(json.dumps(written(side, name)))
        return {job.name: jobs.Ended(lost.get(job.name, 0), 2.0) for job in todo}

    monkeypatch.setattr(jobs, "run", run)
    return there, started, kept, lost


def test_every_case_runs_on_both_sides_and_is_judged(driver, tmp_path):
    _, started, kept, _ = driver
    report = engine_compare.compare_engines(NAMES, tmp_path / "fresh")
    assert [case["problems"] for case in report["cases"]] == [[]] * len(NAMES) and kept["engine"] is report
    for side in engine_compare.SIDES:
        assert sorted(name for job in started if job.command[1] == side for name in job.command[4:]) == sorted(NAMES)
    assert {job.gpus for job in started} == {("3",)}
    assert all(("OVERLAY_CONFIG" in job.env) == (job.command[1] == "ours") for job in started)


def test_a_run_that_was_cut_short_goes_on_and_says_whose_answers_it_has(driver, tmp_path):
    there, started, _, _ = driver
    engine_compare.compare_engines(NAMES[:2], tmp_path / "kept")
    there.update(date="2026-02-02", commit="def")
    report = engine_compare.compare_engines(NAMES[:3], tmp_path / "kept")
    assert [name for job in started[2:] for name in job.command[4:]] == [NAMES[2]] * 2
    assert report["date"] == "2026-01-01" and report["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "NVIDIA GeForce RTX 5090"},
        {"capability": "12.0"},
        {"driver": "590.10"},
        {"versions": {**THERE["versions"], "torch": "2.15.0"}},
        {"versions": {**THERE["versions"], "flashinfer-python": "0.8.0"}},
        {"versions": {**THERE["versions"], "cupy-cuda13x": "15.0.0"}},
    ],
)
def test_answers_of_another_machine_are_not_taken_for_this_ones(driver, monkeypatch, change):
    there, started, kept, _ = driver
    monkeypatch.setattr("sys.argv", ["engine_compare"])
    assert engine_compare.main() == 0 and engine_compare.main() == 0
    first = len(started)
    assert first == 6
    there.update(change)
    assert engine_compare.main() == 0
    assert len(started) == 2 * first and kept["engine"].items() >= change.items()


@pytest.mark.parametrize("source", ["sitecustomize.py", "patches.toml", "cuda/a.cuh", "overlay/kernel/load.py"])
def test_answers_of_other_sources_have_another_folder(monkeypatch, tmp_path, source):
    monkeypatch.setattr(engine_compare, "ROOT", tmp_path)
    file = tmp_path / source
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("1")
    before = engine_compare.resumable(THERE)
    assert engine_compare.resumable({**THERE, "date": "2027-01-01", "commit": "other"}) == before
    file.write_text("2")
    assert engine_compare.resumable(THERE) != before


def test_a_child_that_died_is_named_with_its_signal(driver, tmp_path):
    _, _, _, lost = driver
    lost[f"ours: {', '.join(NAMES[:3])}"] = -11
    report = engine_compare.compare_engines(NAMES, tmp_path / "fresh")
    for number, case in enumerate(report["cases"]):
        assert [("died of SIGSEGV after 2 s" in problem) for problem in case["problems"]] == [True] * (number < 3)


def test_a_stock_engine_that_answers_no_numbers_allows_nothing(driver, tmp_path):
    engine_compare.compare_engines(NAMES[:1], tmp_path / "kept")
    for key in ("answers", "again"):
        result = written("stock", NAMES[0])
        result[key][0]["prompt_logprobs"][3] = float("nan")
        (tmp_path / "kept" / f"stock-{NAMES[0]}.json").write_text(json.dumps(result))
        verdict = engine_compare.judge(BY_NAME[NAMES[0]], tmp_path / "kept")
        assert "the stock engine is no yardstick: prompt 0: a log-probability is no number" in verdict["problems"]
        assert verdict["allowed_by_prompt"] == [0.02]
        json.dumps(verdict, allow_nan=False)


def test_no_gpu_is_said(driver, monkeypatch):
    driver[0]["gpu"] = None
    monkeypatch.setattr(sys, "argv", ["engine_compare"])
    with pytest.raises(SystemExit, match="no GPU"):
        engine_compare.main()
