"""Which NVFP4 scales can be used, and how the others are repaired. Pure functions on tensors; vLLM is not imported.

A weight is ``fp4 * block scale * global scale``, an activation is quantised with one *input scale* per projection.
ModelOpt and Quark store scales as factors. compressed-tensors stores global and input scales as their reciprocals:
``reciprocal`` says so, and every rule below is about the factor.

Shapes: input scales are ``[experts]`` (down) or ``[experts, 2]`` (gate and up, which read the same input), of a linear
layer ``[partitions]``. Global weight scales have the same shapes. Block scales are e4m3, ``[experts, out, in / 16]``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from overlay.nvfp4.policy import LARGEST_SCALE

# Rescaling e4m3 block scales costs up to 6 % per block: below this ratio it would do more harm than the mismatch.
MISMATCH_RATIO = 1.1
# Elements looked at together: bounds the temporaries beside a layer's block scales, which are 300 MB at 288 experts.
CHUNK = 1 << 24


def usable(values: torch.Tensor, reciprocal: bool = False) -> torch.Tensor:
    """Elementwise: False where NaN (never loaded), infinite, zero, negative, subnormal or above 1e4."""
    tiny = torch.finfo(torch.float32).tiny
    values = values.float()
    factor = 1.0 / values if reciprocal else values
    return values.isfinite() & (values >= tiny) & (factor >= tiny) & (factor <= LARGEST_SCALE)


@dataclass(frozen=True)
class Reading:
    """What was loaded into one input-scale parameter, and what can be made of it.

    ``bad`` are the rows (experts, or partitions of a linear layer) without any usable value; ``one_sided`` those with a
    usable value for gate or up alone; ``elsewhere`` those of experts on other ranks that this rank never loaded.
    ``completed`` is the stored tensor with one-sided rows completed from their partner.
    """

    completed: torch.Tensor
    reciprocal: bool
    rows: int
    bad: tuple[int, ...]
    one_sided: tuple[int, ...]
    elsewhere: tuple[int, ...]

    @property
    def clean(self) -> bool:
        return not (self.bad or self.one_sided or self.elsewhere)

    @property
    def all_bad(self) -> bool:
        return bool(self.bad) and len(self.bad) + len(self.elsewhere) == self.rows

    def repaired(self) -> torch.Tensor:
        """As stored: bad rows, and rows of other ranks, take the largest usable factor, which covers every row."""
        good = self.completed[usable(self.completed, self.reciprocal)]
        return self._with(good.min() if self.reciprocal else good.max())

    def filled(self, factor: float) -> torch.Tensor:
        """As stored: rows without a usable value take `factor`."""
        return self._with(1.0 / factor if self.reciprocal else factor)

    def _with(self, value: torch.Tensor | float) -> torch.Tensor:
        values = self.completed.clone()
        values[list(self.bad + self.elsewhere)] = value
        return values


def gates_for_both(values: torch.Tensor) -> torch.Tensor | None:
    """``[experts, 2]`` with gate's value for up as well, or None unless every row has gate's (first) and none up's."""
    if values.shape[1] != 2 or values[:, 0].isnan().any() or not values[:, 1].isnan().all():
        return None
    return values[:, :1].expand_as(values).contiguous()


def read_input_scales(values: torch.Tensor, reciprocal: bool = False, local: torch.Tensor | None = None) -> Reading:
    """Classify an input-scale parameter ``[rows]`` or ``[rows, shards]``.

    `local`, a mask ``[rows]``, marks the experts of this rank where the parameter spans all ranks. A row of another
    rank that was never loaded (NaN) is no fault; any other unusable value there is one, because kernels that share one
    scale among all experts take the maximum over it.
    """
    values = values.detach().float().cpu()
    ok = usable(values, reciprocal)
    table, ok_table = values.view(len(values), -1), ok.view(len(values), -1)
    some, every = ok_table.any(1), ok_table.all(1)
    one_sided = some & ~every
    # gate and up read the same input, so the usable value of the pair holds for both
    worst = float("inf") if reciprocal else float("-inf")
    candidates = table.masked_fill(~ok_table, worst)
    partner = candidates.amin(1, keepdim=True) if reciprocal else candidates.amax(1, keepdim=True)
    completed = torch.where(one_sided[:, None] & ~ok_table, partner, table).view_as(values)
    elsewhere = torch.zeros_like(some) if local is None else ~some & ~local.cpu() & table.isnan().all(1)
    return Reading(
        completed=completed,
        reciprocal=reciprocal,
        rows=len(values),
        bad=_where(~some & ~elsewhere),
        one_sided=_where(one_sided),
        elsewhere=_where(elsewhere),
    )


def unusable_weight_scales(values: torch.Tensor, reciprocal: bool = False) -> tuple[int, ...]:
    """Rows of a global weight scale that cannot be computed with: NaN, infinite or negative factors.

    Zero stays: it is how an all-zero projection is stored, and its product is right.
    """
    values = values.detach().float().cpu()
    factor = 1.0 / values if reciprocal else values
    bad = ~(factor.isfinite() & (factor >= 0) & ~values.isnan())
    return _where(bad.view(len(bad), -1).any(1))


def margin(shape: Sequence[int], parts: int, rows: int | None, columns: int | None) -> torch.Tensor | None:
    """Mask ``[out, in / 16]`` of the block scales of `shape` that lie beyond what is loaded; None where nothing does.

    Loaded are the first `rows` of each of `parts`, which lie one behind the other, and of those the first
    `columns` / 16; a size that is None is not padded.
    """
    height, width = shape[0] // parts, shape[1]
    loaded_rows = height if rows is None else min(height, rows)
    loaded_columns = width if columns is None else min(width, columns // 16)
    if (loaded_rows, loaded_columns) == (height, width):
        return None
    mask = torch.ones(parts, height, width, dtype=torch.bool)
    mask[:, :loaded_rows, :loaded_columns] = False
    return mask.flatten(0, 1)


def unloaded_blocks(
    blocks: torch.Tensor, margin: torch.Tensor | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of e4m3 block scales ``[rows, ...]`` that are NaN altogether, and those that are NaN in part.

    What `margin` marks of a row is not looked at.
    """
    wanted = torch.ones(blocks.shape[1:], dtype=torch.bool) if margin is None else ~margin
    per_row, wanted = int(wanted.sum()), wanted.to(blocks.device)
    nan_counts = torch.cat([(_is_nan(part) & wanted).flatten(1).sum(1) for part in _chunks(blocks)]).cpu()
    return _where(nan_counts == per_row), _where((nan_counts > 0) & (nan_counts < per_row))


def zero_unloaded_blocks(blocks: torch.Tensor) -> None:
    """In place: NaN block scales become zero, so that padding which no loader writes contributes nothing."""
    for part in _chunks(blocks):
        part.view(torch.uint8).masked_fill_(_is_nan(part), 0)


def mismatched(values: torch.Tensor, reciprocal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Global scales ``[rows, shards]`` of shards that one kernel call shares -> (factors to apply to each shard's block
    scales ``[rows, shards]``, mask ``[rows]`` of rows whose largest and smallest factor differ by more than 1.1).

    The larger scale is kept: the block scales of the others shrink, so none can overflow e4m3.
    """
    factor = values.detach().float()
    factor = 1.0 / factor if reciprocal else factor
    largest = factor.amax(1, keepdim=True)
    differs = (factor.amin(1) * MISMATCH_RATIO < largest[:, 0]) & (largest[:, 0] > 0)
    return factor / largest, differs


def reconcile(
    values: torch.Tensor, blocks: torch.Tensor, widths: Sequence[int], reciprocal: bool = False
) -> tuple[int, ...]:
    """In place: give the shards of a fused projection one global scale where theirs differ by more than 1.1.

    `values` ``[rows, shards]`` are the global scales as stored, `blocks` ``[rows, sum(widths), columns]`` the e4m3
    block scales, whose consecutive `widths` belong to the shards. Returns the rows that were changed; all others stay
    bit for bit.
    """
    factors, differs = mismatched(values, reciprocal)
    changed = _where(differs)
    for row in changed:
        for shard, part in enumerate(blocks[row].split(list(widths))):
            if (scale := factors[row, shard].item()) != 1.0:
                part.copy_((part.float() * scale).to(blocks.dtype))
        values[row] = values[row].amin() if reciprocal else values[row].amax()
    return changed


def _where(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _is_nan(blocks: torch.Tensor) -> torch.Tensor:
    # e4m3fn has one NaN pattern of either sign; isnan is not implemented for it on every device
    return (blocks.view(torch.uint8) & 0x7F) == 0x7F


def _chunks(blocks: torch.Tensor) -> Iterator[torch.Tensor]:
    return blocks.split(max(1, CHUNK // max(1, blocks[0].numel())))
