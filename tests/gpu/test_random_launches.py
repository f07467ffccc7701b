"""Ten thousand launches with shapes, strides and indices drawn at random, each against the fp64 reference."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu.random_launches import run  # noqa: E402

pytestmark = pytest.mark.gpu


def test_ten_thousand_launches_at_random():
    report = run(10_000, 1200.0, seed=1)
    assert report["failures"] == []
    assert report["launches"] == 10_000
