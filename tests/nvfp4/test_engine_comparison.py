"""How the answers of NVFP4 engines on a GPU are judged; the engines themselves are in tests/gpu."""

import copy
import json

import pytest

from tests.gpu import nvfp4_engine
from tests.gpu.nvfp4_engine import ENGINES, PROMPTS, REFERENCES, is_good, judge

GOOD = {
    "answers": [
        {
            "tokens": [65, 66],
            "logprobs": [-1.0, -1.5],
            "margins": [0.9, 0.3],
            "prompt_logprobs": [-2.0, -3.0, -2.5],
        }
        for _ in range(PROMPTS)
    ]
}


def changed(where: str, value: float, position: int = 1, prompt: int = 2) -> dict:
    result = copy.deepcopy(GOOD)
    result["answers"][prompt][where][position] = value
    return result


def test_the_same_answers():
    found = judge(GOOD, GOOD)
    assert found["problems"] == []
    assert (found["largest"], found["tokens"], found["prompt_tokens"]) == (0.0, 2 * PROMPTS, 3 * PROMPTS)


@pytest.mark.parametrize(
    ("result", "problems"),
    [
        (changed("prompt_logprobs", -3.04), 0),
        (changed("logprobs", -1.54), 0),
        (changed("prompt_logprobs", -3.06), 1),
        (changed("logprobs", -1.56), 2),  # of the answer, and of the prompt's largest
        (changed("prompt_logprobs", float("nan")), 1),
        (changed("tokens", 67), 1),  # the margin is 0.3
        (changed("tokens", 67, position=0), 1),
        ({"error": "RuntimeError: out of memory"}, 1),
    ],
)
def test_what_differs_is_a_problem(result, problems):
    found = judge(result, GOOD)
    assert len(found["problems"]) >= problems
    assert bool(found["problems"]) == bool(problems)
    json.dumps(found, allow_nan=False)


def test_a_tie_is_none():
    close = copy.deepcopy(GOOD)
    close["answers"][0]["margins"][1] = 0.08
    assert judge(changed("tokens", 67, prompt=0), close)["problems"] == []


def report(**changes: dict) -> dict:
    engines = {name: {"problems": ["differs"] if "stock" in name else []} for name in REFERENCES}
    refused = {"error": "ScaleError: --moe-backend emulation quantises activations"}
    return {"engines": {**engines, "refused": refused, **changes}}


def test_a_good_run():
    assert is_good(report())


@pytest.mark.parametrize(
    "changes",
    [
        {"stock": {"problems": []}},
        {"overlay": {"problems": ["prompt 3: differs by up to 0.0885"]}},
        {"re-routed": {"problems": [], "error": "no answer"}},
        {"linears, stock": {"problems": ["no answer"], "error": "no answer"}},
        {"refused": {}},
    ],
)
def test_a_bad_run(changes):
    assert not is_good(report(**changes))


def test_every_engine_has_a_checkpoint_and_a_reference():
    names = [engine.name for engine in ENGINES]
    assert len(set(names)) == len(names)
    assert set(REFERENCES) | set(REFERENCES.values()) | {"refused"} == set(names)
    folders = {folder for folder, options in nvfp4_engine.CHECKPOINTS.items()}
    folders |= {options[-1] for options in nvfp4_engine.CHECKPOINTS.values() if "--twin" in options}
    assert {engine.checkpoint for engine in ENGINES} == folders
    assert all(not engine.overlay for engine in ENGINES if "stock" in engine.name)
