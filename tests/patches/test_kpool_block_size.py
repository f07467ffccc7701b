"""kpool_block_size against the real block-size choice and indexer cache of 0.30 and 0.31, as a day-0 image has them."""

from pathlib import Path

import pytest

from overlay.context import Context
from overlay.hardware import Device, Hardware
from overlay.patches.kpool_block_size import ALIGNMENT, CUDA, INDEXER, probe
from overlay.sources import VllmSources


@pytest.fixture
def answers(answer):
    found = answer("kpool_block_size")
    if found is None:
        pytest.skip(
            "this release aligns in the indexer's backend: its parts cannot be put together as in a day-0 image"
        )
    return found


@pytest.mark.parametrize("case", ["auto", "1152"])
def test_a_day_0_image_pages_by_32(answers, case):
    """1152 = 288 * 4 tokens, and 64 does not divide 288."""
    assert answers["stock"][case]["block"] == 1152
    assert answers["stock"][case]["page"] == 32


def test_wrapped_pages_every_size_by_64(answers):
    assert {case["page"] for case in answers["wrapped"].values()} == {64}


@pytest.mark.parametrize("case", ["auto", "1152", "8960"])
def test_the_patch_chooses_what_the_release_chooses(answers, case):
    """Block size, linear-attention page and who asked for the size: all as the release's own alignment leaves them."""
    assert answers["wrapped"][case] == answers["release"][case]


def verdict(sources: VllmSources) -> str:
    hardware = Hardware()
    hardware.__dict__["devices"] = (Device("NVIDIA GB10", (12, 1), True),)
    return probe(Context("kpool_block_size", {}, "auto", sources, hardware)).kind


def test_it_stands_down_on_the_installed_release():
    assert verdict(VllmSources.find()) == "absent"


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        ("", "present"),
        (f"class CudaPlatformBase:\n    def {ALIGNMENT}(cls): return cls.is_device_capability_family(120)\n", "absent"),
    ],
)
def test_it_is_on_in_a_day_0_image(tmp_path: Path, cuda: str, expected: str):
    """Its marks: the model, an indexer without a backend of its own, a CUDA platform without an alignment."""
    files = {"vllm.models.glm5next": "", INDEXER: "class DeepseekV32IndexerBackend: ...", CUDA: cuda}
    for module, text in files.items():
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert verdict(VllmSources(tmp_path / "vllm")) == expected
