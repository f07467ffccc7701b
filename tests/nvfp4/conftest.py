"""One stock process and one with the overlay run every case; all modules read their answers."""

from pathlib import Path
from typing import Any

import pytest

from overlay.checkpoint import tiny, tiny_quant
from overlay.checkpoint.tiny_config import TinyModel
from tests.conftest import run_python
from tests.nvfp4.checks import TINY


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for case, fault in TINY:
        tiny.write_quantised(TinyModel(heads=8), *tiny_quant.choose("modelopt", case, fault), folder / case)
    return folder


@pytest.fixture(scope="session")
def stock(fake_driver, tiny_checkpoints) -> dict[str, Any]:
    return run(fake_driver((12, 1), devices=2), tiny_checkpoints)


@pytest.fixture(scope="session")
def wrapped(fake_driver, tiny_checkpoints) -> dict[str, Any]:
    return run(fake_driver((12, 1), overlay=True, devices=2), tiny_checkpoints)


def run(env: dict[str, str], tiny_checkpoints: Path) -> dict[str, Any]:
    # DeepGEMM converts block scales of FP8 on a GPU alone
    more = {"TINY_CHECKPOINTS": str(tiny_checkpoints), "VLLM_USE_DEEP_GEMM": "0"}
    return run_python("tests.nvfp4.runner", env | more, timeout=900)
