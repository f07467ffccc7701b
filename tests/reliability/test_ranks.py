"""The comparison of several ranks with one sees what it is there to see; the driver, with a child that stands in."""

import copy
import json
from dataclasses import replace

import pytest

from tests.gpu import jobs, rank_cases, ranks
from tests.gpu.rank_cases import RankCase, cases, judge, noise, not_run, reference

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
            job.log.write_text("".join(f"(Worker_TP0 pid=7) {line}\n" for line in lines))
            lines.clear()
            (job.log.parent / f"{name}.json").write_text(json.dumps(good(BY_NAME[name])))
        return {job.name: jobs.Ended(0, 1.0) for job in todo}

    monkeypatch.setattr(jobs, "run", run)
    return lambda **options: ranks.run(None, False, 10.0, 8, **options), kept, lines


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
