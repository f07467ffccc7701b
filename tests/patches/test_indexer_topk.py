"""indexer_topk against vLLM's real dispatcher on a 12.1 platform."""

import pytest

AUTOMATIC = ["auto, 1 row", "auto, 33 rows", "auto, 4 drafts"]


@pytest.fixture
def answers(answer):
    return answer("indexer_topk")


@pytest.mark.parametrize("case", AUTOMATIC)
def test_stock_takes_the_persistent_top_k(answers, case):
    assert answers["stock"][case]["resolved"] == "persistent"
    assert [call["name"] for call in answers["stock"][case]["called"]] == ["persistent_topk"]


@pytest.mark.parametrize("case", AUTOMATIC)
def test_wrapped_takes_the_one_that_works_row_by_row(answers, case):
    assert answers["wrapped"][case]["resolved"] == "per_row"
    assert [call["name"] for call in answers["wrapped"][case]["called"]] == ["top_k_per_row_decode"]


def test_drafts_keep_their_own_lengths(answers):
    (call,) = answers["wrapped"]["auto, 4 drafts"]["called"]
    assert call["numbers"] == [4, 8, 65536, 1, 512]  # next_n, rows, strides, k


@pytest.mark.parametrize("case", ["persistent", "auto, k 256"])
def test_other_answers_are_left_alone(answers, case):
    assert answers["wrapped"][case] == answers["stock"][case]
    assert answers["wrapped"]["persistent"]["resolved"] == "persistent"


@pytest.mark.parametrize("case", [*AUTOMATIC, "persistent"])
def test_another_card_of_a_mixed_machine_keeps_vllms_choice(answers, case):
    """Armed because some visible GPU is 12.x; what counts is the one in use. `true` asks for it anywhere."""
    assert answers["another card"][case] == answers["stock"][case]
    assert answers["another card, true"][case] == answers["wrapped"][case]


def test_the_direct_call_of_0_30(answers):
    if answers["0.30 stock"] is None:
        pytest.skip("this vLLM's indexer asks the dispatcher")
    assert [call["name"] for call in answers["0.30 stock"]] == ["persistent_topk"]
    assert answers["0.30 another card"] == answers["0.30 stock"]
    assert answers["0.30 wrapped"] == [{"name": "top_k_per_row_decode", "numbers": [4, 8, 4096, 1, 512]}]
