"""What is asked: log lines of any length with facts hidden in them, and prompts whose answers are easy to judge.

The filler is numbered lines of drawn words, not one sentence repeated: a repeated one compresses to a few pools of the
sparse indexer, and a model that lost its context would still seem to know it.
"""

import random
from collections.abc import Sequence

PLACES = ("Alder", "Birch", "Cedar", "Dahlia", "Elm", "Fern", "Gorse", "Hazel", "Iris", "Juniper", "Kelp", "Laurel")
SUBJECTS = ("The harbour pilot", "A night porter", "The second clerk", "An old surveyor", "The relief driver")
DEEDS = ("checked", "repainted", "counted", "returned", "weighed", "mended", "mislaid", "labelled")
THINGS = ("the brass lamps", "two oak barrels", "a coil of rope", "the tide tables", "seven grain sacks", "a ladder")
WHEN = ("before dawn", "at noon", "after the storm", "during the fair", "late in the evening")

CANARIES = (
    "Write one paragraph about how rivers shape the land around them.",
    "List the first twelve prime numbers, then explain in two sentences what a prime number is.",
    "Translate into Chinese, Japanese and Korean, then add an emoji: The train to the mountains leaves at six.",
    "Write a Python function that merges two sorted lists, with a short docstring.",
)

SPEED = {
    "code": "Write a complete Python module that implements an LRU cache with time-to-live, with type hints and tests.",
    "prose": "Tell a long story about a lighthouse keeper who finds a message in a bottle.",
    "structured": (
        "Print a JSON array of forty objects with the keys id, name, city, joined (ISO date) and active, and nothing "
        "else."
    ),
}


def lines(count: int, seed: int) -> list[str]:
    """`count` log lines; another seed gives other lines throughout."""
    draw = random.Random(seed)
    return [
        f"Entry {number:05}: {draw.choice(SUBJECTS)} {draw.choice(DEEDS)} {draw.choice(THINGS)} {draw.choice(WHEN)}."
        for number in range(1, count + 1)
    ]


def codes(count: int, seed: int) -> list[str]:
    """`count` different six-digit codes."""
    return [str(code) for code in random.Random(seed).sample(range(100_000, 1_000_000), count)]


def haystack(count: int, seed: int, depths: Sequence[float]) -> tuple[str, list[str]]:
    """A prompt of `count` log lines with one code at each depth (0 to 1) and a question for all; and those codes."""
    log, hidden = lines(count, seed), codes(len(depths), seed + 1)
    places = random.Random(seed + 2).sample(PLACES, len(depths))
    for depth, place, code in sorted(zip(depths, places, hidden, strict=True), reverse=True):
        log.insert(round(depth * len(log)), f"Note: the access code of the {place} depot is {code}.")
    names = ", ".join(places)
    question = f"From the log above: what is the access code of each of these depots: {names}? Answer with codes only."
    return "\n".join((*log, "", question)), hidden


def continuation(count: int, seed: int) -> str:
    """A prompt of `count` log lines that asks for many more."""
    log = "\n".join(lines(count, seed))
    return f"{log}\n\nContinue this log for three hundred more entries in the same format, each with other words."


def echo(code: str) -> str:
    """A prompt of one kind for every row of a batch; the answer is the row's own code."""
    return f"Reply with this code and nothing else: {code}"
