"""The judge of the GPU engine tests must see what it is there to see."""

import copy

import pytest

from tests.gpu.engine_cases import CASES, LOGPROB_TOLERANCE, PROMPT_LENGTHS, SPOKEN, compare, prompts, tolerances

TOLERANCE = [0.02, 0.02]


@pytest.fixture
def answers():
    return [
        {
            "tokens": [5, 6, 7],
            "logprobs": [-0.5, -1.0, -2.0],
            "margins": [1.0, 0.03, 0.5],
            "prompt_logprobs": [-3.0, -4.0],
        },
        {"tokens": [9, 8, 7], "logprobs": [-0.1, -0.2, -0.3], "margins": [2.0, 2.0, 2.0], "prompt_logprobs": []},
    ]


def changed(answers, number, key, step, value):
    other = copy.deepcopy(answers)
    other[number][key][step] = value
    return other


def test_equal_answers_pass(answers):
    found = compare(answers, copy.deepcopy(answers), TOLERANCE)
    assert (found.problems, found.tokens, found.prompt_tokens, found.largest) == ([], 6, 2, 0.0)


def test_a_small_difference_is_measured(answers):
    found = compare(answers, changed(answers, 0, "logprobs", 1, -1.015), TOLERANCE)
    assert found.problems == []
    assert found.largest == pytest.approx(0.015)


def test_a_large_difference_of_an_answer_is_a_problem(answers):
    (problem,) = compare(answers, changed(answers, 0, "logprobs", 1, -4.5), TOLERANCE).problems
    assert problem == "prompt 0: log-probabilities of its answer differ by up to 3.5000, allowed is 0.0200"


@pytest.mark.parametrize(("jumps", "problems"), [(1, 0), (2, 0), (3, 1)])
def test_a_prompt_may_jump_at_two_of_ten_thousand_positions(answers, jumps, problems):
    stock = [{**answers[0], "prompt_logprobs": [-3.0] * 10_000}]
    ours = [{**answers[0], "prompt_logprobs": [-4.0] * jumps + [-3.0] * (10_000 - jumps)}]
    found = compare(stock, ours, TOLERANCE[:1])
    assert (len(found.jumps), len(found.problems)) == (jumps, problems)
    assert found.jumps[0] == (0, 0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_a_problem(answers, value):
    assert compare(answers, changed(answers, 1, "logprobs", 2, value), TOLERANCE).problems


def test_another_token_is_a_problem_where_the_margin_is_clear(answers):
    (problem,) = compare(answers, changed(answers, 0, "tokens", 0, 77), TOLERANCE).problems
    assert problem == "prompt 0, token 0: 5 became 77, margin 1.000"


def test_another_token_is_a_tie_where_it_is_not_and_ends_the_comparison_of_that_answer(answers):
    other = changed(changed(answers, 0, "tokens", 1, 77), 0, "logprobs", 2, -9.0)
    found = compare(answers, other, TOLERANCE)
    assert (found.problems, found.ties, found.tokens) == ([], 1, 4)


def test_a_missing_answer_is_a_problem(answers):
    assert compare(answers, answers[:1], TOLERANCE).problems == ["2 answers against 1"]


def test_nothing_compared_is_a_problem():
    assert compare([], [], TOLERANCE).problems == ["no generated token could be compared"]


def test_the_stock_engines_own_noise_widens_a_prompts_allowance_and_no_other():
    answer = {"tokens": [5], "logprobs": [-0.5], "margins": [1.0], "prompt_logprobs": [-3.0]}
    stock, again = [answer, answer], [answer, {**answer, "prompt_logprobs": [-3.04]}]
    assert tolerances(stock, again, 0.02) == pytest.approx([0.02, 0.06])
    assert tolerances(stock, [answer, answer], 0.02) == [0.02, 0.02]


def test_the_configurations():
    assert [case.name for case in CASES] == [
        "bf16 eager",
        "bf16 graphs",
        "fp8 graphs",
        "bf16 MTP",
        "bf16 64 heads",
        "fp8 8 heads",
        "bf16 two layers",
    ]
    assert [case.name for case in CASES if case.control] == ["bf16 eager"]
    assert {case.tolerance for case in CASES} == {0.02, 0.1} == set(LOGPROB_TOLERANCE.values())


def test_prompts_reach_past_the_top_k_and_are_the_same_everywhere():
    assert [len(tokens) for tokens in prompts()] == list(PROMPT_LENGTHS)
    assert min(PROMPT_LENGTHS) == 7 and max(PROMPT_LENGTHS) == 12000
    assert prompts() == prompts()
    assert {token for tokens in prompts() for token in tokens} <= set(SPOKEN)
