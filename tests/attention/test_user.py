"""The patch as a user has it: found through PYTHONPATH, applied when vLLM imports its modules."""

import pytest

from tests.conftest import ROOT, run_python


@pytest.fixture(scope="module")
def seen(fake_driver):
    return run_python("tests.attention.scenario_user", fake_driver((12, 1), overlay=True), timeout=550)


def test_bfloat16_rows_are_served_where_vllm_has_no_backend_for_them(seen):
    assert seen["sitecustomize"] == str(ROOT)
    assert seen["with"] == "OVERLAY_SPARSE_MLA"
    assert seen["without"].startswith("ValueError: No valid attention backend found")


def test_the_patch_is_active_in_both_of_its_modules(seen):
    assert seen["state"] == "active"
    assert seen["modules"] == ["vllm.platforms.cuda", "vllm.v1.attention.backends.registry"]


def test_the_command_lines_custom_is_our_backend(seen):
    assert seen["custom"] == "overlay.attention.backend.SparseMLABackend"
