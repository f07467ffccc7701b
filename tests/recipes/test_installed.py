"""The installed vLLM takes every recipe: its argument parser, and its plan for the full-size geometry.

Three processes: one parser for all lines, one rehearsal for each kind of GPU.
"""

import os
from dataclasses import replace

import pytest

from overlay.recipes import boxes, check
from overlay.recipes.declare import Recipe
from overlay.recipes.memory import GIB, budget
from overlay.rehearsal import columns
from overlay.sources import VllmSources

RECIPES = list(boxes.RECIPES.values())
NO_FLAG = ["--no-such-flag", "7"]


def release() -> tuple[int, int]:
    return boxes.parse_release(VllmSources.find().version)


@pytest.fixture(scope="module")
def objections() -> list[str | None]:
    """One for each command line of each recipe, then one for a flag that no vLLM has."""
    asked = [words for recipe in RECIPES for words in check.commands(recipe, release())]
    return check.objections([*asked, [*asked[0], *NO_FLAG]], (12, 1))


def test_every_line_is_taken_by_the_argument_parser(objections):
    assert objections[:-1] == [None] * (len(objections) - 1)


def test_a_flag_that_it_does_not_have_is_not(objections):
    assert "no-such-flag" in objections[-1]


@pytest.fixture(scope="module")
def planned() -> dict[str, dict]:
    """Recipe name -> the overlay's column, with the KV cache memory that the recipe's own sum leaves."""
    found = {}
    with check.stand_in() as folder:
        for capability in sorted({recipe.capability for recipe in RECIPES}):
            same = [recipe for recipe in RECIPES if recipe.capability == capability]
            questions = [_question(recipe, folder) for recipe in same]
            base = {**os.environ, **check.variables(same[0], release())}
            answers = columns.ask_all(questions, columns=("overlay",), base=base)
            found |= {recipe.name: answer["overlay"] for recipe, answer in zip(same, answers, strict=True)}
    return found


def _question(recipe: Recipe, folder) -> columns.Question:
    left = int(budget(recipe).left * GIB)
    return replace(check.question(recipe, release(), folder), memory=96 * GIB, kv_memory=left)


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def recipe(request) -> Recipe:
    return request.param


def test_each_recipe_would_boot_with_this_backend(planned, recipe):
    findings = list(check.plan(planned[recipe.name], published=True))
    assert [finding for finding in findings if not finding.ok] == []
    assert {finding.name for finding in findings} == {"boots", "attention backend", "experts", "KV cache"}


def test_the_sum_agrees_with_the_model_that_vllm_builds(planned, recipe):
    """The sum has the vision tower, which is not built here; the draft layer's embedding is, and shared later."""
    built = planned[recipe.name]["weight_bytes"] / GIB
    assert budget(recipe).weights == pytest.approx(built, rel=0.015)


def test_tokens_are_no_more_than_the_sum_says(planned, recipe):
    column = planned[recipe.name]
    assert column["bytes_per_token"] == pytest.approx(budget(recipe).token_bytes, rel=0.01)
    assert column["kv_tokens"] <= budget(recipe).tokens * 1.01


def test_drafting_and_graphs_are_what_the_recipe_asked_for(planned, recipe):
    assert planned[recipe.name]["cudagraph_mode"] == "FULL_DECODE_ONLY"
