"""Single patches on a GPU: in captured graphs, by the planner's own figure, in served answers, in the compile cache.

Slow (minutes: sixteen engines, nine processes at a time). `python -m tests.gpu.patches` is the same without pytest.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from overlay import cli  # noqa: E402
from tests.gpu import patches  # noqa: E402

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.get_device_capability() == (9, 0)
ASKED = [name for name in patches.JUDGES if HOPPER or name != "flashinfer_fa2"]  # FA3, its stock side, is Hopper's


@pytest.fixture(scope="module")
def report():
    names = [name for patch in ASKED for name in patches.JUDGES[patch][0]]
    return patches.run(names, at_once=9, seconds=1500, archive=None)["patches"]


@pytest.mark.parametrize("patch", ASKED)
def test_the_patch_does_what_it_says(report, patch):
    assert report[patch]["problems"] == []


def test_enough_was_compared(report):
    if "flashinfer_fa2" not in report:
        pytest.skip("needs a Hopper GPU")
    for dtype in patches.TOLERANCE:
        assert report["flashinfer_fa2"][dtype]["prompt_tokens"] == 6 + 63 + 500 + 2046
        assert report["flashinfer_fa2"][dtype]["tokens"] >= 4 * 12


@pytest.mark.parametrize("probe", ["attention", "indexer"])
def test_the_probe_finds_nothing_wrong(capsys, probe):
    status = cli.main(["probe", probe, "--json", "--keep"])
    document = json.loads(capsys.readouterr().out)
    wrong = [row for row in document["rows"] if row["ok"] is False and row["required"]]
    assert (status, document["broken"], wrong) == (0, "", [])
