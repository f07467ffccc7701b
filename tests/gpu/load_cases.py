"""What a server under load is asked, and what is counted of its answers. Pure: no network, no GPU."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.engine_cases import LOGPROB_TOLERANCE, SPOKEN

NEW_TOKENS = 24
LONGEST = 8192  # --max-model-len
# One token, both sides of a pool of 4 and of a tile of 64, then up to a chunk of 2048 and beyond the top-k of 2048.
FIXED_LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 250, 501, 1023, 1500, 2047, 3001, 5003, LONGEST - NEW_TOKENS)
PROMPTS = 40
# Of 100 requests: what becomes of them. An answer to "whole" and "streamed" is compared.
MIX = {"whole": 42, "streamed": 42, "aborted": 6, "cancelled": 5, "malformed": 5}


def prompts() -> list[list[int]]:
    """Token ids, the same in every process. Lengths that are not fixed are drawn between 1 and 700."""
    draw = random.Random(77)
    lengths = [*FIXED_LENGTHS, *(round(700 ** draw.random()) for _ in range(PROMPTS - len(FIXED_LENGTHS)))]
    return [draw.choices(SPOKEN, k=length) for length in lengths]


def weights(lengths: Sequence[int]) -> list[float]:
    """How often each prompt is asked: long ones less, so that they do not take all the time."""
    return [1.0 if length <= 700 else 700 / length for length in lengths]


def request(model: str, prompt: list[int], stream: bool) -> dict[str, Any]:
    """The JSON of /v1/completions: greedy, NEW_TOKENS long, with what is needed to compare answers."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": stream,
    }


def malformed(model: str, prompt: list[int]) -> dict[str, bytes | dict[str, Any]]:
    """Requests that no server can serve, by name; each must be refused with a 4xx and disturb nobody."""
    good = request(model, prompt, stream=False)
    return {
        "no JSON": b'{"model": "' + model.encode() + b'", "prompt": [1, 2',
        "a list": b"[1, 2, 3]",
        "no prompt": {key: value for key, value in good.items() if key != "prompt"},
        "empty prompt": {**good, "prompt": [[]]},
        "empty text": {**good, "prompt": ""},
        "prompt of another type": {**good, "prompt": {"text": "x"}},
        "token beyond the vocabulary": {**good, "prompt": [10**6]},
        "token below zero": {**good, "prompt": [-1]},
        "too long": {**good, "prompt": [65] * LONGEST},
        "far too long": {**good, "prompt": [65] * (4 * LONGEST)},
        "negative length": {**good, "max_tokens": -1},
        "hot": {**good, "temperature": "hot"},
        "negative temperature": {**good, "temperature": -1},
        "another model": {**good, "model": "nobody"},
        "too many log-probabilities": {**good, "logprobs": 10**6},
    }


def answer_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of one choice of a whole answer, or of all its streamed pieces put together."""
    logprobs = choice["logprobs"]
    best = [sorted(step.values(), reverse=True) for step in logprobs["top_logprobs"]]
    return {
        "prompt": list(choice["prompt_token_ids"] or ()),
        "tokens": list(choice["token_ids"]),
        "logprobs": list(logprobs["token_logprobs"]),
        "margins": [values[0] - values[1] for values in best],
        "finish": choice["finish_reason"],
    }


def joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The streamed pieces of one choice as a whole one. A stream that was cut has no `finish_reason`."""
    whole: dict[str, Any] = {"token_ids": [], "finish_reason": None, "prompt_token_ids": None}
    logprobs: dict[str, list] = {"token_logprobs": [], "top_logprobs": []}
    for piece in pieces:
        whole["prompt_token_ids"] = whole["prompt_token_ids"] or piece.get("prompt_token_ids")
        whole["token_ids"] += piece.get("token_ids") or []
        whole["finish_reason"] = piece.get("finish_reason") or whole["finish_reason"]
        for key, values in logprobs.items():
            values += (piece.get("logprobs") or {}).get(key) or []
    return {**whole, "logprobs": logprobs}


def difference(alone: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[float, int]:
    """How far an answer is from itself alone, and after how many tokens the two part.

    A log-probability's distance while the tokens agree; where they part, half the margin that it takes to change
    places. What follows has another context and says nothing. NaN counts as infinite.
    """

    def number(distance: float) -> float:
        return distance if distance == distance else float("inf")

    largest = 0.0
    steps = zip(alone["tokens"], loaded["tokens"], alone["logprobs"], loaded["logprobs"], strict=False)
    for step, (a, b, p, q) in enumerate(steps):
        if a != b:
            return max(largest, number(alone["margins"][step] / 2)), step
        largest = max(largest, number(abs(p - q)))
    return largest, min(len(alone["tokens"]), len(loaded["tokens"]))


def owner(loaded: Mapping[str, Any], alone: Sequence[Mapping[str, Any]], asked: int) -> int:
    """Which prompt's answer this is: `asked`, unless it is not that one's and another's from beginning to end.

    Answers of random weights can begin alike, so a common beginning with another prompt's answer proves nothing.
    """
    if difference(alone[asked], loaded)[1] == NEW_TOKENS:
        return asked
    whole = [i for i, other in enumerate(alone) if difference(other, loaded)[1] == NEW_TOKENS]
    return whole[0] if whole else asked


@dataclass
class Tally:
    """What came of all requests of one server."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # of malformed requests
    distances: list[float] = field(default_factory=list)
    parted: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def see(self, asked: int, prompt: list[int], answer: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> None:
        """Count one complete answer."""
        self.outcomes["answered"] += 1
        if answer["prompt"] != prompt:
            self.problem("crossed", f"the answer to prompt {asked} names another prompt")
        if answer["finish"] != "length" or len(answer["tokens"]) != NEW_TOKENS:
            self.problem("lost", f"prompt {asked}: {len(answer['tokens'])} tokens, finished by {answer['finish']}")
            return
        whose = owner(answer, alone, asked)
        if whose != asked:
            self.problem("crossed", f"the answer to prompt {asked} is that to prompt {whose}")
        distance, agreed = difference(alone[asked], answer)
        self.distances.append(distance)
        self.tokens += agreed
        self.parted += agreed < NEW_TOKENS

    def problem(self, kind: str, said: str) -> None:
        self.outcomes[kind] += 1
        if self.outcomes[kind] <= 5:
            self.problems.append(f"{kind}: {said}")

    def refused(self, name: str, status: str) -> None:
        """Count the answer to a malformed request."""
        self.outcomes["malformed"] += 1
        self.statuses.setdefault(name, Counter())[status] += 1

    def figures(self, tolerance: float) -> dict[str, Any]:
        beyond = sum(distance > tolerance for distance in self.distances)
        return {
            "requests": dict(self.outcomes),
            "refusals": {name: dict(counts) for name, counts in sorted(self.statuses.items())},
            "compared_answers": len(self.distances),
            "compared_tokens": self.tokens,
            "parted_answers": self.parted,
            "beyond_tolerance": beyond,
            "tolerance": tolerance,
            "largest_difference": max(self.distances, default=0.0),
            "problems": self.problems,
        }


def tolerance(rows: str) -> float:
    return LOGPROB_TOLERANCE[rows]
