"""indexer_workspace against vLLM's real variables and its real chunking of a long prefill."""

import pytest


@pytest.fixture
def answers(answer):
    return answer("indexer_workspace")


def test_defaults(answers):
    assert answers["stock"]["default"] == 512
    assert answers["wrapped"]["default"] == 64


def test_the_scores_of_a_long_prefill_stay_small(answers):
    assert 500 < answers["stock"]["scores"] <= 512
    assert answers["wrapped"]["scores"] <= 64


def test_what_the_user_set_stays_and_the_environment_is_not_touched(answers):
    assert answers["wrapped"]["set by the user"] == answers["stock"]["set by the user"] == 300
    assert not answers["environment"]
