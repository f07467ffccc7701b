"""Rows of scores for the indexer's top-k, and how a selection is judged.

Only torch. Scores past a row's length are huge and must not be looked at; where scores are equal, any of them will do.
"""

from dataclasses import dataclass

import torch

POOL, K = 4, 512  # tokens of a pool, and pools that GLM-5.3-Flash selects of a row
ROWS = (33, 100)  # more than one wave of either kernel; up to 64 rows vLLM prefers another kernel than beyond
BEYOND = 3e38


@dataclass(frozen=True)
class Case:
    """`scores` fp32 [rows, width], `lengths` int32 [rows]; rows in `unclear` hold NaN, which has no order."""

    name: str
    scores: torch.Tensor
    lengths: torch.Tensor
    unclear: torch.Tensor  # bool [rows]


def cases(rows: int, device: str | torch.device = "cpu") -> list[Case]:
    random = torch.Generator(device).manual_seed(rows)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(rows, count, generator=random, device=device)

    def crowded(count: int) -> torch.Tensor:
        """Distinct scores between 1 and 1 + 2^-6, in random order: every coarse bin of fp32 or fp16 bits takes all."""
        order = torch.rand(rows, count, generator=random, device=device).argsort(1)
        return 1 + order.float() / (count << 6)

    full = [torch.full((rows,), n, dtype=torch.int32, device=device) for n in (16_384, 16_385, 40_000)]
    short = torch.arange(rows, dtype=torch.int32, device=device) * (2 * K) // rows
    short[1:4] = torch.tensor([1, K - 1, K], dtype=torch.int32, device=device)
    nan = normal(20_000)
    nan[::5] = torch.nan
    nan[1::5, ::3] = torch.nan
    nan_rows = nan.isnan().any(1)
    return [
        case("40,000 values", normal(40_000), full[2]),
        case("16,384 values in one bin", crowded(16_384), full[0]),
        case("16,385 values in one bin", crowded(16_385), full[1]),
        case("one value", torch.ones(rows, 16_385, device=device), full[1]),
        case("short rows", normal(2 * K), short),
        case("NaN rows", nan, torch.full_like(short, nan.shape[1]), nan_rows),
    ]


def case(name: str, scores: torch.Tensor, lengths: torch.Tensor, unclear: torch.Tensor | None = None) -> Case:
    """Scores in rows of a multiple of 64 elements, as logits come; what lies past a row's length is a trap."""
    rows, count = scores.shape
    padded = torch.full((rows, -(-count // 64) * 64), BEYOND, device=scores.device)
    padded[:, :count] = scores
    column = torch.arange(padded.shape[1], device=scores.device)
    padded.masked_fill_(column >= lengths[:, None], BEYOND)
    return Case(name, padded, lengths, torch.zeros_like(lengths, dtype=torch.bool) if unclear is None else unclear)


def wrong(given: Case, chosen: torch.Tensor) -> int:
    """Entries of `chosen` int32 [rows, K] that are not right.

    A row owes min(K, length) distinct ids with the largest scores, and -1 in all other columns. A row with NaN owes
    distinct ids within its length, as many as it likes.
    """
    ids, length = chosen.long(), given.lengths.long()[:, None]
    valid = (ids >= 0) & (ids < length)
    outside = ~valid & (ids != -1)
    in_order = torch.where(valid, ids, given.scores.shape[1] + torch.arange(K, device=ids.device)).sort(1).values
    repeated = torch.zeros_like(valid)
    repeated[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    reach = torch.arange(given.scores.shape[1], device=ids.device) < length
    scores = given.scores.masked_fill(~reach, -torch.inf)
    found = scores.gather(1, ids.clamp(0, scores.shape[1] - 1)).masked_fill(~valid, -torch.inf)
    best = scores.topk(K, dim=1).values
    missed = found.sort(1, descending=True).values != best
    clear = ~given.unclear[:, None]
    return int((outside | repeated | (missed & clear)).sum())


def expanded(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int32 [rows, K * POOL + POOL - 1]: the tokens of pools that exist, -1 for others, then the incomplete pool's."""
    pools = (lengths.long() // POOL)[:, None]
    within = torch.arange(POOL, device=ids.device)
    tokens = torch.where((ids >= 0) & (ids < pools), ids, -1)[:, :, None] * POOL + within
    tokens = torch.where(tokens < 0, -1, tokens).flatten(1)
    tail = pools * POOL + within[: POOL - 1]
    return torch.cat([tokens, torch.where(tail < lengths[:, None], tail, -1)], 1).int()
