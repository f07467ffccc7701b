"""The canaries: what counts as one unit repeated, and when two greedy answers contradict each other."""

import pytest

from overlay.acceptance import texts
from overlay.acceptance.canaries import divergence, misplaced, repeated_unit
from overlay.acceptance.client import Answer, Token
from overlay.acceptance.gates import mismatch


@pytest.mark.parametrize("unit", ["lock", "!", "\n", " the", "是", "word another "])
def test_a_unit_repeated_to_the_end_is_told(unit):
    found = repeated_unit("The capital is " + unit * 60)
    assert found is not None
    assert len(found) == len(unit)


def test_a_cut_last_unit_changes_nothing():
    assert repeated_unit(("lock" * 60)[:-2]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "haha",
        "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37",
        "| --- | --- | --- |\n| a | b | c |",
        "Entry 00001: a porter. " + "Entry 00002: a clerk. " + "Entry 00003: a driver. ",
        "=" * 39,
        "lock" * 60 + " and then it recovered and said something else entirely.",
    ],
)
def test_ordinary_text_is_not(text):
    assert repeated_unit(text) is None


def token(text: str, *others: str, logprob: float = -0.5) -> Token:
    return Token(text, logprob, {name: logprob for name in (text, *others)})


def test_equal_answers_and_answers_that_part_at_a_near_tie_agree():
    one = [token("a"), token("b", "c"), token("x")]
    assert divergence(one, one) is None
    assert divergence(one, [token("a"), token("c", "b"), token("zebra")]) is None


def test_answers_that_part_where_one_was_sure_do_not():
    one, other = [token("a"), token("b", "d")], [token("a"), token("c", "b")]
    assert "token 1" in divergence(one, other)
    assert divergence([token("a")], [token("z")]) is not None


def answer(text: str) -> Answer:
    pieces = tuple(token(character) for character in text)
    return Answer(text, pieces, "length", 10, len(pieces), None, 0.1, 0.2)


def test_an_answer_that_turns_to_garbage_is_told_and_one_that_was_is_left_to_its_own_gate():
    good, loop = answer("The river bends twice before it meets the sea, and once after."), answer("lock" * 20)
    assert "over and over" in mismatch(good, loop)
    assert mismatch(loop, loop) is None
    assert "no log-probabilities" in mismatch(good, Answer("x", (), "stop", 1, 1, None, 0.1, 0.2))


def test_rows_that_lack_their_code_and_rows_that_hold_another():
    codes = ["111111", "222222", "333333"]
    assert misplaced(["111111", " 222222.", "it is 333333"], codes) == ([], [])
    assert misplaced(["222222", "111111", "none"], codes) == ([0, 1, 2], [(0, 1), (1, 0)])


def test_filler_is_numbered_and_no_line_follows_itself():
    log = texts.lines(400, 1)
    assert len(set(log)) == 400
    assert log != texts.lines(400, 2)


def test_needles_stand_where_they_should():
    prompt, codes = texts.haystack(100, 5, (0.1, 0.5, 0.9))
    rows = prompt.splitlines()
    for depth, code in zip((0.1, 0.5, 0.9), codes, strict=True):
        (place,) = [number for number, row in enumerate(rows) if code in row]
        assert place == pytest.approx(depth * 100, abs=3)
