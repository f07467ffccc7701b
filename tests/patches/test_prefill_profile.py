"""prefill_profile against vLLM's real MLAAttention: bytes of the profile run, and of a real forward pass."""

import pytest


@pytest.fixture
def measured(answer):
    return answer("prefill_profile")


def test_stock_sets_gigabytes_aside_for_a_prefill_that_never_runs(measured):
    assert measured["stock"]["ours, 64 heads"] == 69632 * 64 * 512 * 2
    assert measured["stock"]["ours, 32 heads"] == 69632 * 32 * 512 * 2


@pytest.mark.parametrize("heads", ["64 heads", "32 heads"])
def test_the_profile_run_covers_exactly_what_the_forward_pass_allocates(measured, heads):
    assert measured["wrapped"][f"ours, {heads}"] == measured["forward"][heads]
    assert measured["forward"][heads] < measured["stock"][f"ours, {heads}"]


def test_the_figures_of_the_declaration(measured):
    assert measured["wrapped"]["ours, 64 heads"] == 2 * 8192 * 64 * 512 * 2  # 1.07 GB


def test_context_parallel_ranks_are_counted(measured):
    assert measured["wrapped"]["ours, 32 heads, dcp 2"] == 3 * measured["wrapped"]["ours, 32 heads"]


@pytest.mark.parametrize("case", ["native", "with a dense prefill"])
def test_other_layers_are_left_alone(measured, case):
    assert measured["wrapped"][case] == measured["stock"][case] > 4e9
