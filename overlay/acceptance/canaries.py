"""Signs of a broken engine in what it says: one unit repeated to the end, or two answers that cannot both be right."""

from collections.abc import Sequence

from overlay.acceptance.client import Token

LONGEST_UNIT = 48
FEWEST_REPEATS = 8
SHORTEST_RUN = 40  # characters; "haha" and a row of a table are no fault, a screen of them is


def repeated_unit(text: str) -> str | None:
    """The unit that `text` ends in a long run of (`"lock"` in "...locklocklocklock"), or None.

    Counts characters and not tokens, so it needs nothing from the server. A run of blanks is told as well.
    """
    for size in range(1, LONGEST_UNIT + 1):
        wanted = max(size * FEWEST_REPEATS, SHORTEST_RUN)
        if len(text) < wanted:
            break
        tail = text[-wanted:]
        if tail[size:] == tail[:-size]:
            return tail[:size]
    return None


def divergence(first: Sequence[Token], second: Sequence[Token]) -> str | None:
    """Why two greedy answers to one prompt cannot come from one model, or None.

    Greedy text differs between batch shapes in every engine, so strings are not compared. At the first position where
    the two part, each one's token must be among the other's listed alternatives; the positions after it have different
    contexts and say nothing.
    """
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one.text == other.text:
            continue
        if other.text in one.top and one.text in other.top:
            return None
        return (
            f"at token {position} one answer has {one.text!r} ({one.logprob:.2f}), the other {other.text!r} "
            f"({other.logprob:.2f}), and not both are among what the other run listed as likely"
        )
    return None


def misplaced(answers: Sequence[str], codes: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows whose answer lacks its own code, and pairs (row, owner) where it holds another row's."""
    owner = {code: row for row, code in enumerate(codes)}
    silent, crossed = [], []
    for row, answer in enumerate(answers):
        if codes[row] not in answer:
            silent.append(row)
        found = {answer[i : i + len(codes[row])] for i in range(len(answer))}
        crossed += [(row, owner[code]) for code in sorted(found & owner.keys()) if owner[code] != row]
    return silent, crossed


def steps(values: Sequence[int]) -> str:
    """`64, 128 and 256`."""
    text = [f"{value:,}" for value in values]
    return text[0] if len(text) == 1 else f"{', '.join(text[:-1])} and {text[-1]}"
