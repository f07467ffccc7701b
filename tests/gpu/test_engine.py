"""The real engine on a tiny model: vLLM's own backend of this GPU against ours, in six configurations.

Slow (minutes: twelve engines, several at a time). `python -m tests.gpu.engine_compare --help` runs parts of it.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu.engine_cases import CASES  # noqa: E402
from tests.gpu.engine_compare import compare_engines  # noqa: E402

pytestmark = pytest.mark.gpu
every_case = pytest.mark.parametrize("name", [case.name for case in CASES])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Of engines that ran now: only the command line goes on where an earlier run stopped."""
    names = [case.name for case in CASES]
    report = compare_engines(names, tmp_path_factory.mktemp("engine"), timeout=1500)
    return {case["name"]: case for case in report["cases"]}


@every_case
def test_our_engine_answers_as_vllms_own_does(verdicts, name):
    assert verdicts[name]["problems"] == []


@every_case
def test_enough_was_compared(verdicts, name):
    """Every prompt's tokens, and most of what was generated before two engines may part at a tie."""
    assert verdicts[name]["generated_tokens"] >= 8 * 12
    if "MTP" not in name:
        assert verdicts[name]["prompt_tokens"] > 28_000


@every_case
def test_the_engines_ran_on_different_backends(verdicts, name):
    assert verdicts[name]["backends"]["ours"] == ["OVERLAY_SPARSE_MLA"]
    assert "OVERLAY_SPARSE_MLA" not in verdicts[name]["backends"]["stock"]


def test_the_control_fails(verdicts):
    """Zeroed attention is noticed: the model's answers depend on it."""
    eager = verdicts["bf16 eager"]
    assert eager["zeroed_problems"] > 0
    assert eager["zeroed_largest_logprob_difference"] > 10 * eager["tolerance"]
