"""The engine on a weight-only NVFP4 model: stock multiplies by scales that nobody loaded, the overlay does not."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from overlay import measurement  # noqa: E402
from tests.gpu.nvfp4_compare import judge, run  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def verdict(tmp_path_factory):
    report = judge(run(tmp_path_factory.mktemp("nvfp4"), timeout=400))
    measurement.keep("nvfp4-engine", {**measurement.provenance(), **report})
    return report


def test_the_overlay_answers_as_the_bf16_twin_and_stock_does_not(verdict):
    assert verdict["problems"] == []


def test_enough_was_compared(verdict):
    assert verdict["tokens"] >= 8 * 12 and verdict["prompt_tokens"] > 28_000


def test_stock_is_far_off(verdict):
    assert verdict["stock_largest_logprob_difference"] > 10 * verdict["tolerance"]


def test_the_overlay_says_what_it_did(verdict):
    assert any("W4A16" in line for line in verdict["decisions"])
