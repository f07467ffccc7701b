"""integrated_memory against vLLM's real Worker and MemorySnapshot, on a machine whose memory is a script.

120 GiB, 10 of them taken by others; 90 % may be used; 60 GiB of weights and 4 GiB of activations: 44 GiB are planned.
"""

import pytest


@pytest.fixture
def answers(answer):
    return answer("integrated_memory")


def test_where_the_pages_are_free_nothing_changes(answers):
    assert answers["stock"]["no page cache"] == answers["wrapped"]["no page cache"] == {"kv": pytest.approx(44)}


def test_stock_plans_with_pages_that_the_driver_cannot_get(answers):
    assert answers["stock"]["page cache"] == {"kv": pytest.approx(44)}  # 20 GiB are free
    assert answers["stock"]["no page left"] == {"kv": pytest.approx(44)}  # 2 GiB are free


def test_the_cache_is_cut_to_what_is_free(answers):
    assert answers["wrapped"]["page cache"] == {"kv": pytest.approx(20 - 4 - 2)}  # less activations, less the reserve


def test_what_cannot_be_delivered_is_refused_with_the_figures(answers):
    refused = answers["wrapped"]["no page left"]
    assert refused["error"] == "MemoryShortage"
    for figure in ("plans a KV cache of 44.0 GiB", "MemFree 2.0 GiB", "MemAvailable 50.0 GiB", "flush-cache"):
        assert figure in refused["said"]


def test_a_size_that_the_user_asked_for_is_refused_not_cut(answers):
    refused = answers["wrapped"]["asked for too much"]
    assert refused["error"] == "MemoryShortage"
    assert "--kv-cache-memory-bytes" in refused["said"]
    assert answers["wrapped"]["asked for what is there"] == answers["stock"]["asked for what is there"]


def test_a_size_that_an_earlier_boot_planned_is_cut_as_its_own_was(answers):
    """vLLM replays a start-up plan through the setting that a user asks with; nobody asked here."""
    assert answers["stock"]["planned too much"] == {"kv": pytest.approx(44)}
    assert answers["wrapped"]["planned too much"] == {"kv": pytest.approx(20 - 2)}  # less the reserve
    assert answers["wrapped"]["planned what is there"] == answers["stock"]["planned what is there"]


@pytest.mark.parametrize("case", ["given back while loading", "given back while profiling"])
def test_memory_that_others_give_back_stops_nothing(answers, case):
    assert answers["stock"][case]["error"] == "AssertionError"
    assert answers["wrapped"][case]["kv"] > 90


def test_gpus_with_their_own_memory_are_left_alone(answers):
    assert answers["wrapped"]["memory of its own"] == answers["stock"]["memory of its own"]


def test_loading_drops_the_checkpoints_pages_while_it_runs_and_at_the_end(answers):
    loading = answers["loading"]
    assert loading["during"] >= 1
    assert loading["all"] > loading["during"]
    assert loading["files"] == ["model-00001-of-00001.safetensors"]
