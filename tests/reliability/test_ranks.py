"""The comparison of several ranks with one sees what it is there to see; the driver, with a child that stands in."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from overlay.hardware import Device
from tests.gpu import jobs, rank_cases, ranks
from tests.gpu.rank_cases import CUTEDSL, FOUR_GPUS, RankCase, cases, judge, left_out, noise, not_run, reference

BY_NAME = {case.name: case for case in cases(4)}


def answers(shift: float = 0.0) -> list[dict]:
    """To two prompts, one of them with log-probabilities of its own; `shift` moves one log-probability."""
    one = {"tokens": [5, 6, 7], "logprobs": [-0.5 + shift, -1.0, -2.0], "margins": [1.0, 0.5, 0.5]}
    two = {"tokens": [9, 8, 7], "logprobs": [-0.1, -0.2, -0.3], "margins": [2.0, 2.0, 2.0]}
    return [{**one, "prompt_logprobs": []}, {**two, "prompt_logprobs": [-3.0] * 9}]


def rank(case: RankCase, number: int) -> dict:
    backend = "FLASHINFER_MLA_SPARSE_SM90" if case.stock else "OVERLAY_SPARSE_MLA"
    layer = {"backend": backend, "kv_cache_dtype": "bfloat16", "cache_shape": [9, 64, 512],
             "heads": case.heads // case.tp, "dcp": case.dcp}  # fmt: skip
    return {"pid": 100 + number, "fingerprint": None if case.stock else "f00d", "layers": [layer]}


def good(case: RankCase) -> dict:
    """What the child of a case writes when all is well."""
    if case.refusal:
        return {"error": f"RanksDiffer: {case.refusal} 7) differs"}
    found = {"ranks": [rank(case, i) for i in range(case.tp)], "answers": answers(), "seconds": {"load": 1.0}}
    return {**found, "control": answers(0.5)} if case.control else found


@pytest.fixture
def results() -> dict[str, dict]:
    return {name: good(case) for name, case in BY_NAME.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_is_held_against_engines_that_agree(results, name):
    assert judge(BY_NAME[name], results)["problems"] == []


def faulty(results, name, **changes):
    return judge(BY_NAME[name], {**results, name: {**results[name], **changes}})["problems"]


def test_another_answer_is_seen(results):
    (problem,) = faulty(results, "tp4 64 bf16 graphs", answers=answers(0.3))
    assert "log-probabilities of its answer differ by up to 0.3" in problem


def test_vllms_own_noise_between_ranks_widens_what_is_allowed(results):
    results["stock tp4 64 bf16"]["answers"] = answers(0.25)
    assert faulty(results, "tp4 64 bf16 graphs", answers=answers(0.3)) == []
    assert faulty(results, "tp2 64 bf16 graphs", answers=answers(0.3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("broken", ["stock tp1 64 bf16", "stock tp4 64 bf16"])
def test_stock_that_answers_no_numbers_is_a_problem_and_allows_nothing(results, broken, value):
    results[broken] = copy.deepcopy(results[broken])
    results[broken]["answers"][1]["prompt_logprobs"][3] = value
    results["tp4 64 bf16 graphs"]["answers"] = answers(0.3)
    (problem,) = judge(BY_NAME[broken], results)["problems"]
    assert problem == "prompt 1: a log-probability is no number"
    verdict = judge(BY_NAME["tp4 64 bf16 graphs"], results)
    assert f"{broken} is no yardstick: {problem}" in verdict["problems"]
    assert any("log-probabilities of its answer differ by up to 0.3" in said for said in verdict["problems"])
    assert verdict["allowed_by_prompt"] == [0.02, 0.02] and "Infinity" not in json.dumps(verdict)


def test_a_rank_with_another_fingerprint_is_seen(results):
    case = BY_NAME["tp4 64 bf16 eager"]
    crew = [rank(case, i) for i in range(4)]
    crew[2]["fingerprint"] = "beef"
    (problem,) = faulty(results, case.name, ranks=crew)
    assert problem == "fingerprints: ['f00d', 'f00d', 'beef', 'f00d']"
    assert "3 ranks answered, not 4" in faulty(results, case.name, ranks=crew[:2] + crew[3:])


def test_ranks_that_ran_something_else_are_seen(results):
    case = BY_NAME["tp2 dcp2 bf16 graphs"]
    crew = [rank(replace(case, dcp=1), i) for i in range(2)]
    assert any("context parallelism" in problem for problem in faulty(results, case.name, ranks=crew))
    crew = [rank(replace(case, heads=32), i) for i in range(2)]
    assert "{16} heads a rank, not 32" in faulty(results, case.name, ranks=crew)
    crew = [rank(replace(case, stock=True), i) for i in range(2)]
    assert "ran on FLASHINFER_MLA_SPARSE_SM90" in faulty(results, case.name, ranks=crew)


def test_a_control_that_passes_is_a_problem(results):
    assert any("the control passed" in p for p in faulty(results, "tp2 dcp2 bf16 eager", control=answers()))


@pytest.mark.parametrize("name", [name for name, case in BY_NAME.items() if case.refusal])
def test_an_engine_that_should_have_been_refused(results, name):
    (problem,) = faulty(results, name, error="")
    assert problem.endswith("it served")
    (problem,) = faulty(results, name, error="RuntimeError: CUDA out of memory")
    assert "out of memory" in problem


def test_a_missing_engine_is_a_problem_of_all_that_need_it(results):
    del results["tp2 64 bf16 eager"]
    assert judge(BY_NAME["tp2 64 bf16 eager"], results)["problems"] == ["no answer"]
    (problem,) = judge(BY_NAME["tp2 dcp2 bf16 graphs"], results)["problems"]
    assert problem == "cannot be compared without tp2 64 bf16 eager"


def test_everything_that_a_comparison_needs_runs_on_the_same_machine():
    for gpus in (2, 4):
        here = {case.name for case in cases(gpus)}
        for case in cases(gpus):
            if case.refusal is None and case.tp > 1:
                assert {reference(case), *noise(case)} <= here
    assert not not_run(4, True) and all(name.startswith(("tp4", "stock tp4")) for name in not_run(2, True))


def test_what_is_not_run_is_named_with_the_reason():
    merged = not_run(4, False)
    assert set(merged) == {case.name for case in cases(4) if case.dcp > 1 and case.refusal is None}
    assert all("CuteDSL" in reason for reason in merged.values())
    assert not_run(4, True, ["tp1 64 bf16"])["tp1 64 fp8"] == "because it was not asked for"


def test_what_should_have_run_and_did_not_is_a_problem():
    two = not_run(2, True)
    assert left_out(two, gpus=2) == {} and left_out(two, gpus=4) == {FOUR_GPUS: list(two)}
    assert left_out(not_run(4, False), gpus=4) == {CUTEDSL: list(not_run(4, False))}
    assert set(left_out(not_run(2, False), gpus=2)) == {CUTEDSL}
    asked = ["tp1 64 bf16", "tp2 dcp2 bf16 eager", "tp4 64 bf16 eager"]
    assert left_out(not_run(4, True, asked), 2, asked) == {}
    assert left_out(not_run(2, False, asked), 2, asked) == {FOUR_GPUS: asked[2:], CUTEDSL: asked[1:2]}


def test_the_cases_are_those_that_are_promised():
    ours = [case for case in cases(4) if not case.stock and case.refusal is None]
    ran = {(case.tp, case.dcp, case.heads, case.rows, case.eager) for case in ours}
    four = {(4, 1, 64, rows, eager) for rows in ("bf16", "fp8") for eager in (True, False)}
    two = {(2, 1, heads, "bf16", eager) for heads in (64, 32) for eager in (True, False)}
    assert four | two | {(2, 2, 64, "bf16", True), (2, 2, 64, "bf16", False), (4, 2, 64, "bf16", False)} <= ran
    assert {(case.tp, case.odd) for case in cases(4) if case.odd} == {(2, "switch"), (2, "none"), (4, "none")}


def test_engine_arguments():
    arguments = BY_NAME["tp4 dcp2 fp8 eager"].engine_arguments("/folder", "fp8")
    assert arguments["tensor_parallel_size"] == 4 and arguments["decode_context_parallel_size"] == 2
    assert arguments["cp_kv_cache_interleave_size"] % rank_cases.SMALLEST_INTERLEAVE == 0
    assert "decode_context_parallel_size" not in BY_NAME["tp2 64 bf16 eager"].engine_arguments("/folder", "bfloat16")
    for case in cases(4):
        assert case.engine_arguments("/f", "auto")["compilation_config"]["pass_config"] == rank_cases.NO_FUSION


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_get_as_many_gpus_as_they_need_and_small_engines_spread(tmp_path, count):
    gpus = tuple("0123"[:count])
    for tp in (1, 2, 4)[: 2 if count < 4 else 3]:
        used = set()
        for number in range(8):
            job = ranks.job_of(RankCase("x", tp), number, gpus, tmp_path, {})
            assert len(job.gpus) == tp and len(set(job.gpus)) == tp
            used.update(job.gpus)
        assert len(used) == count - count % tp


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`run` as on a machine of two GPUs; its children write what `good` says, and start-up lines."""
    monkeypatch.setattr(ranks, "WORK", tmp_path / "work")
    monkeypatch.setattr(jobs, "gpus", lambda: ("0", "1"))
    monkeypatch.setattr(ranks, "find_spec", lambda name: object())
    monkeypatch.setattr(ranks, "write_checkpoint", lambda heads, work: None)
    kept = {}
    monkeypatch.setattr(ranks.measurement, "keep", lambda name, document: kept.update({name: document}))
    lines = ["overlay[pid 7]: kernel cache: compiled sparse_mla_h32_bf16 for sm_90 in 1.2 s"]

    def run(todo, at_once, seconds, **options):
        for job in todo:
            module, name, folder = job.command
            assert module == "tests.gpu.rank_child" and folder == str(job.log.parent)
            if name in lost:
                continue
            job.log.write_text("".join(f"(Worker_TP0 pid=7) {line}\n" for line in lines))
            lines.clear()
            (job.log.parent / f"{name}.json").write_text(json.dumps(good(BY_NAME[name])))
        return {job.name: jobs.Ended(lost.get(job.name, 0), 1.0) for job in todo}

    lost: dict[str, int | None] = {}
    monkeypatch.setattr(jobs, "run", run)

    def started(dead: dict[str, int | None] | None = None, **options):
        """`dead`: children that write no answer, and their status."""
        lost.update(dead or {})
        return ranks.run(None, False, 10.0, 8, **options)

    return started, kept, lines


def test_the_driver_judges_all_that_two_gpus_can_run_and_names_the_rest(driver, tmp_path, capsys):
    run, kept, _ = driver
    report = run(archive=tmp_path / "all.tgz")
    assert kept["ranks"] is report and ranks.tell(report) == 0
    assert [case["name"] for case in report["cases"]] == [case.name for case in cases(4) if case in cases(2)]
    assert report["compiled"] == {"sparse_mla_h32_bf16": 1}
    assert "not run, for want of four GPUs: tp4 64 bf16 graphs" in capsys.readouterr().out
    assert (tmp_path / "all.tgz").stat().st_size > 1000


def test_a_kernel_that_two_ranks_compile_is_a_problem(driver):
    run, _, lines = driver
    lines *= 2
    assert run()["problems"] == ["sparse_mla_h32_bf16 was compiled 2 times"]


def test_every_gpu_that_jobs_ran_on_is_named(driver):
    run, _, _ = driver
    jobs_of = run()["jobs"]
    assert jobs_of["tp2 64 bf16 eager"]["gpus"] == ["0", "1"]
    assert {gpu for job in jobs_of.values() for gpu in job["gpus"]} == {"0", "1"}


@pytest.mark.parametrize(
    ("status", "said"), [(-11, "died of SIGSEGV after 1 s"), (-9, "died of SIGKILL"), (None, "no answer in time")]
)
def test_a_child_that_died_is_not_one_that_was_slow(driver, tmp_path, monkeypatch, capsys, status, said):
    """Judged at once, and again from the folder."""
    run, kept, _ = driver
    run({"tp2 64 bf16 eager": status})
    for again in (False, True):
        if again:
            (folder,) = (tmp_path / "work").iterdir()
            monkeypatch.setattr("sys.argv", ["ranks", "--answers", str(folder)])
            assert ranks.main() == 1
        (case,) = (case for case in kept["ranks"]["cases"] if case["name"] == "tp2 64 bf16 eager")
        (problem,) = case["problems"]
        assert said in problem and kept["ranks"]["jobs"][case["name"]]["status"] == status


def test_answers_without_a_word_of_how_the_children_ended(driver, tmp_path):
    run, _, _ = driver
    run({"tp2 64 bf16 eager": -11})
    (folder,) = (tmp_path / "work").iterdir()
    (folder / jobs.ENDED).unlink()
    (case,) = (case for case in ranks.report_of(None, folder)["cases"] if case["name"] == "tp2 64 bf16 eager")
    assert case["problems"] == ["no answer, and how its process ended was not kept"]


def test_two_runs_of_one_process_id_have_folders_of_their_own(driver, tmp_path, monkeypatch):
    run, _, lines = driver
    monkeypatch.setattr(ranks.os, "getpid", lambda: 1)
    first = list(lines)
    run()
    lines += first
    run()
    assert len(list((tmp_path / "work").iterdir())) == 2


@pytest.mark.parametrize("lies", ["nowhere", "beside"])
def test_engines_that_were_left_out_for_want_of_cutedsl_are_a_problem(driver, monkeypatch, tmp_path, capsys, lies):
    """Also where the package lies on PYTHONPATH, whose .pth files Python does not read."""
    package = SimpleNamespace(submodule_search_locations=["/site/nvidia_cutlass_dsl"])
    found = {"nvidia_cutlass_dsl": package} if lies == "beside" else {}
    monkeypatch.setattr(ranks, "find_spec", found.get)
    report = driver[0]()
    assert ranks.tell(report) == 1
    (problem,) = report["problems"]
    way_out = {"nowhere": "pip install nvidia-cutlass-dsl", "beside": "put /site/nvidia_cutlass_dsl/dsl_packages on"}
    assert way_out[lies] in problem and problem.endswith(": tp2 dcp2 bf16 eager, tp2 dcp2 bf16 graphs")
    assert problem in capsys.readouterr().out


def test_a_gpu_that_is_too_small_is_refused(driver, monkeypatch):
    monkeypatch.setattr(jobs.Hardware, "devices", [Device("a GPU", (12, 0), False, 8 << 30)])
    with pytest.raises(SystemExit, match="too small"):
        ranks.run(None, False, 10.0)


def test_load_tests_have_their_gpus_to_themselves_and_end_in_time(tmp_path):
    for gpus in ("01", "0123"):
        todo = ranks.load_jobs(tuple(gpus), tmp_path, {}, 3000.0)
        loads = [job for job in todo if "tests.gpu.load" in job.command]
        assert len(loads) == len(gpus) // 2 and all(job.alone for job in loads)
        budgets = [float(job.command[job.command.index("--budget") + 1]) for job in loads]
        assert sum(budgets) < 3000.0 - ranks.STOP_S


def test_answers_can_be_judged_again(driver, tmp_path, monkeypatch, capsys):
    run, kept, _ = driver
    first = copy.deepcopy(run())
    (folder,) = (tmp_path / "work").iterdir()
    monkeypatch.setattr("sys.argv", ["ranks", "--answers", str(folder)])
    assert ranks.main() == 0
    assert kept["ranks"]["cases"] == first["cases"]


@pytest.mark.parametrize(("here", "asked"), [(1, 2), (2, 4), (0, 2)])
def test_too_few_gpus_are_refused_by_name(monkeypatch, here, asked):
    monkeypatch.setattr(jobs, "gpus", lambda: tuple("0123"[:here]))
    monkeypatch.setattr("sys.argv", ["ranks", "--gpus", str(asked)])
    with pytest.raises(SystemExit, match=f"{here} GPUs here; this compares engines of several ranks, on {asked}"):
        ranks.main()
