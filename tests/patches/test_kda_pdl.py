"""kda_pdl against vLLM's real platform class."""

import pytest

from overlay.patches.kda_pdl import PATCH


@pytest.fixture
def answers(answer):
    return answer("kda_pdl")


def test_stock_enables_it_from_9_0(answers):
    assert answers["stock"] == {"12.1": True, "12.0": True, "9.0": True, "8.9": False}


def test_wrapped_says_no_on_12_only(answers):
    assert answers["wrapped"] == {"12.1": False, "12.0": False, "9.0": True, "8.9": False}


def test_it_is_off_by_default():
    assert PATCH.default is False
