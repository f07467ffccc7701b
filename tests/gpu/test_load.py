"""`vllm serve` under load: four minutes of 64 clients, and two minutes of 128 on four ranks. Slow, as long as that."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu import load  # noqa: E402

pytestmark = pytest.mark.gpu


def test_64_clients_for_four_minutes(tmp_path):
    report = load.run(1, 64, 240.0, 1200.0, tmp_path)
    assert report["problems"] == []
    assert report["ours"]["load_seconds"] == 240
    assert report["ours"]["compared_answers"] > 1000


def test_128_clients_on_four_ranks_for_two_minutes(tmp_path):
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs four GPUs, here are {torch.cuda.device_count()}")
    report = load.run(4, 128, 120.0, 1200.0, tmp_path)
    assert report["problems"] == []
    assert report["ours"]["load_seconds"] == 120
    assert report["ours"]["compared_answers"] > 1000
