"""Several ranks on the GPUs of one machine against one rank: tensor and context parallelism, and ranks that differ.

Slow (minutes: up to two dozen engines, several at a time). Two GPUs run one half of it, four GPUs all.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("cupy")
if torch.cuda.device_count() < 2:
    pytest.skip(
        f"engines of several ranks need two GPUs, here are {torch.cuda.device_count()}", allow_module_level=True
    )

from tests.gpu import jobs, ranks  # noqa: E402
from tests.gpu.rank_cases import FOUR_GPUS, cases  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def report():
    return ranks.run(None, load=False, seconds=1800)


@pytest.mark.parametrize("name", [case.name for case in cases(4)])
def test_case(report, name):
    reason = report["not_run"].get(name)
    if reason == FOUR_GPUS:
        pytest.skip(f"not run {reason}")
    assert reason is None
    (verdict,) = [case for case in report["cases"] if case["name"] == name]
    assert verdict["problems"] == []


def test_every_process_ended_well(report):
    assert [name for name, job in report["jobs"].items() if job["status"] != 0] == []


def test_each_kernel_is_compiled_once_for_all_processes(report):
    assert set(report["compiled"].values()) == {1}
    assert report["processes_with_kernels"] > len(report["compiled"])


def test_all_ranks_of_an_engine_have_one_fingerprint(report):
    ours = [case for case in report["cases"] if "ranks" in case and not case["name"].startswith("stock")]
    assert {len({rank["fingerprint"] for rank in case["ranks"]}) for case in ours} == {1}


def test_every_gpu_had_an_engine(report):
    assert {gpu for job in report["jobs"].values() if job["seconds"] for gpu in job["gpus"]} == set(jobs.gpus()[:4])


def test_nothing_else_was_wrong(report):
    assert report["problems"] == []
