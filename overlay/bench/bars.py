"""The bars that the kernel has to clear, as ratios inside one run. Pure functions of a run's rows.

A row is a dict: `kernel` ("ours" or a peer), the fields of `Case`, `us` (warm L2, a call inside a graph of 20, of 2
from 0.5 ms on) and, for ours, `gather_us` and `multiply_us`, the two limits of that shape in that run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Row = dict[str, object]
FULL_WIDTH = (2048, 2048)
PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class Bar:
    """One bar. `value` is None where the run has not measured what it needs; that bar is not met."""

    name: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "met": self.met, "value": self.value, "limit": self.limit, "at_least": self.at_least}


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Every bar, for every shape that a full run measures."""
    find = _finder(rows)
    return [*_prefill(find), *_peers(find), *_decode(find), *_fp8(find), *_short(find), *_overlap(find)]


Find = Callable[..., Row | None]


def _finder(rows: Sequence[Row]) -> Find:
    def find(heads: int, tokens: int, **other: object) -> Row | None:
        wanted = {"kernel": "ours", "kv_dtype": "bf16", "pattern": "uniform", "columns": 2048, "valid": 2048, **other}
        wanted |= {"heads": heads, "tokens": tokens}
        measured = (row for row in rows if row["us"] is not None)
        return next((row for row in measured if all(row[key] == value for key, value in wanted.items())), None)

    return find


def _ratio(above: Row | None, below: Row | None, key: str = "us") -> float | None:
    """Time of one row over a figure of another; None where one was not measured."""
    return above["us"] / below[key] if above is not None and below is not None else None


def _prefill(find: Find) -> Iterator[Bar]:
    for columns, valid in (FULL_WIDTH, (2176, 2051)):
        for heads, limit in ((8, 1.25), (16, 1.3), (32, 1.6)):
            row = find(heads, PREFILL_TOKENS, columns=columns, valid=valid)
            yield Bar(f"prefill H={heads} K={columns}/{valid}: time over gather", _ratio(row, row, "gather_us"), limit)
        row = find(64, PREFILL_TOKENS, columns=columns, valid=valid)
        ratio = _ratio(row, row, "multiply_us")
        yield Bar(f"prefill H=64 K={columns}/{valid}: time over mma peak", ratio, 1.45 / 0.85)


def _peers(find: Find) -> Iterator[Bar]:
    for heads in (8, 16, 32, 64):
        for tokens in (1, 8, 64, 128, 1024, 4096):
            limit = (3.0 if heads <= 32 else 2.5) if tokens <= 8 else (2.0 if heads <= 32 else 1.4)
            ratio = _ratio(find(heads, tokens, kernel="flashinfer_fa2"), find(heads, tokens))
            yield Bar(f"FlashInfer FA2 over ours, H={heads} T={tokens}", ratio, limit, at_least=True)


def _decode(find: Find) -> Iterator[Bar]:
    for tokens, narrow, wide in ((1, 10, 13), (8, 14, 20)):
        for heads in (8, 16, 32, 64):
            row = find(heads, tokens)
            limit = narrow if heads <= 32 else wide
            yield Bar(f"decode H={heads} T={tokens}: microseconds", row and row["us"], limit)


def _fp8(find: Find) -> Iterator[Bar]:
    for heads in (8, 16, 32, 64):
        for tokens in (1, 8, 64, 128, 1024, 4096):
            limit = {8: 1.25, 16: 1.25, 32: 1.05, 64: 1.0}[heads] if tokens >= 64 else 1.0
            ratio = _ratio(find(heads, tokens), find(heads, tokens, kv_dtype="fp8"))
            yield Bar(f"bf16 over fp8, H={heads} T={tokens}", ratio, limit, at_least=True)


def _short(find: Find) -> Iterator[Bar]:
    for heads in (8, 16, 32, 64):
        for tokens in (64, 128, 1024, 4096):
            long, short = (find(heads, tokens, columns=2176, valid=valid) for valid in (2051, 64))
            yield Bar(f"2051 over 64 valid columns, H={heads} T={tokens}", _ratio(long, short), 5.0, at_least=True)


def _overlap(find: Find) -> Iterator[Bar]:
    for heads in (8, 16, 32, 64):
        ratio = _ratio(find(heads, PREFILL_TOKENS, pattern="overlap"), find(heads, PREFILL_TOKENS))
        yield Bar(f"overlapping over random selections, H={heads}", ratio, 1.0)
