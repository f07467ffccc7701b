"""One child process for the small patches: a GB10 that is not there, every patch in question switched on or auto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_python

SCENARIOS = {path.stem for path in (Path(__file__).parent / "scenarios").glob("[a-z]*.py")}
ALONE = {"rope_pad"}  # stops any other release: its module runs it in a process of its own
SWITCHES = "kda_pdl=true,flashinfer_fa2=auto,kpool_block_size=true"  # off by default; in no release


@pytest.fixture(scope="session")
def gb10(fake_driver, request: pytest.FixtureRequest) -> dict[str, Any]:
    """States, and the answers of the scenarios whose tests were collected.

    NVML reports no memory of its own (memory=0): an integrated GPU. Triton kernels run interpreted on the CPU.
    """
    collected = {item.path.stem.removeprefix("test_") for item in request.session.items}
    env = fake_driver((12, 1), overlay=True, memory=0) | {"OVERLAY_PATCHES": SWITCHES, "TRITON_INTERPRET": "1"}
    return run_python("tests.patches.scenarios", env, *sorted(collected & SCENARIOS - ALONE), timeout=900)


@pytest.fixture(scope="session")
def answer(gb10) -> Callable[[str], Any]:
    """`answer(patch_id)`: its scenario's answer. Skips, with the overlay's own reason, where the fault is absent."""

    def of(patch_id: str) -> Any:
        state = gb10["states"][patch_id]
        if state["state"] == "retired":
            pytest.skip(f"vllm {gb10['vllm']}: {patch_id} is retired: {state['reason']}")
        found = gb10["answers"].get(patch_id, {"failed": f"{patch_id} is {state['state']}: {state['reason']}"})
        assert found is None or "failed" not in found, found["failed"]
        return found

    return of
