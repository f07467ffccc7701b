"""cudagraph_defaults against vLLM's real configuration of the full-size model on an integrated GPU."""

import pytest


@pytest.fixture
def plans(answer):
    return answer("cudagraph_defaults")


@pytest.mark.parametrize("model", ["glm", "nested"])
def test_stock_captures_mixed_batches_in_pieces(plans, model):
    stock = plans["stock"][model]
    assert (stock["mode"], stock["env"]) == ("FULL_AND_PIECEWISE", "1")
    assert stock["graphs"]["PIECEWISE"] > stock["graphs"]["FULL"] > 0


@pytest.mark.parametrize("model", ["glm", "nested"])
def test_wrapped_captures_decode_batches_only_and_the_same_ones(plans, model):
    wrapped = plans["wrapped"][model]
    assert wrapped["mode"] == "FULL_DECODE_ONLY"
    assert wrapped["graphs"] == {"FULL": plans["stock"][model]["graphs"]["FULL"]}


def test_operators_stay_vllms_own(plans):
    """What the passed-around remedy costs: a model that is not compiled, run with no custom operator."""
    kept, lost = plans["wrapped"]["glm"], plans["stock, breakable off"]
    assert (kept["compiled"], kept["custom_ops"]) == (0, ["all"])
    assert (lost["compiled"], lost["custom_ops"]) == (3, ["none"])
    assert lost["mode"] == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("case", ["llama", "mode given", "eager", "O1"])
def test_other_models_and_what_the_user_decided_stay(plans, case):
    assert plans["wrapped"][case] == plans["stock"][case]


def test_the_users_own_variable_decides(plans):
    assert plans["asked"]["mode"] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("where", ["no GPU", "own memory"])
def test_armed_by_a_front_end_it_decides_nothing_for_other_hardware(plans, where):
    """A front end without a GPU cannot know that its workers' share the host's memory: vLLM's default stays, aloud."""
    assert plans[where] == plans["stock"]["glm"]
    assert plans["no GPU, true"] == plans["wrapped"]["glm"]
    assert len(plans["no GPU, said"]) == 1 and "enabled = true" in plans["no GPU, said"][0]
