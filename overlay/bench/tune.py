"""The model behind the choice of variant and split count, fitted to this GPU: every launch timed, then the constants.

The kernel's own constants (`MODEL` in overlay/kernel/plan.py) are an H200's. What this prints takes their place.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from overlay.bench import timing
from overlay.bench.bars import Row
from overlay.bench.cases import HEADS, KV_DTYPES, Case, pool, rotation
from overlay.bench.occupancy import as_on_sm120
from overlay.bench.runner import progress
from overlay.kernel.launch import SparseMLA
from overlay.kernel.plan import MODEL, Cost, Model, microseconds, worth_splitting
from overlay.kernel.variants import VARIANTS, Variant, variants_for

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 64)
COLUMNS = 2048
STEPS = 15_000
_BY_NAME = {variant.name: variant for variant in VARIANTS}


@dataclass(frozen=True)
class Launch:
    """One way to serve a shape."""

    heads: int
    tokens: int
    kv_dtype: str
    variant: str
    splits: int

    @property
    def shape(self) -> tuple[int, int, str]:
        return self.heads, self.tokens, self.kv_dtype

    def modelled(self, model: Model, sm_count: int) -> float:
        return microseconds(model, _BY_NAME[self.variant], self.splits, self.heads, self.tokens, COLUMNS, sm_count)


def launches(sm_count: int, heads: Sequence[int] = HEADS, tokens: Sequence[int] = TOKENS) -> Iterator[Launch]:
    """Every launch of every shape that could be chosen, but for those that leave most of the GPU idle."""
    for kv_dtype, head_count, token_count in itertools.product(KV_DTYPES, heads, tokens):
        for variant in variants_for(head_count, kv_dtype):
            blocks = token_count * -(-head_count // variant.heads)
            possible = [
                splits
                for splits in SPLITS
                if splits == 1 or worth_splitting(variant, head_count, token_count, COLUMNS, sm_count, splits)
            ]
            for splits in possible:
                if splits == possible[-1] or 5 * blocks * splits >= sm_count:
                    yield Launch(head_count, token_count, kv_dtype, variant.name, splits)


def measure(chosen: Sequence[Launch], where: str = "cuda") -> Iterator[Row]:
    """Microseconds of each launch: a call inside a graph, warm L2, occupancy as on sm_120."""
    device = torch.device(where)
    pools = {kv_dtype: pool(kv_dtype, device) for kv_dtype in {launch.kv_dtype for launch in chosen}}
    done = 0
    for (heads, tokens, kv_dtype), group in itertools.groupby(chosen, key=lambda launch: launch.shape):
        kernel = SparseMLA.load(device, heads, kv_dtype)
        case = Case(heads, tokens, COLUMNS, COLUMNS, kv_dtype)
        calls = rotation(case, pools[kv_dtype])
        with as_on_sm120(kernel):
            for launch in group:
                progress(f"{done}/{len(chosen)} {launch}")
                timed = _timed(kernel, calls, _BY_NAME[launch.variant], launch.splits)
                us = timing.warm(timed, repeats=5, captures=timing.CAPTURES)
                yield {**asdict(launch), "us": us}
                done += 1
    progress("")


def _timed(kernel: SparseMLA, calls: Sequence, variant: Variant, splits: int) -> list:
    tokens, columns = calls[0].indices.shape
    room = kernel.plan(tokens, columns, splits, variant).partial_bytes(tokens)
    workspace = torch.empty(max(room, 16), dtype=torch.uint8, device=calls[0].q.device)

    def timed(call):
        return lambda: kernel(
            call.q, call.kv, call.indices, call.scale, call.out, workspace, splits=splits, variant=variant
        )

    return [timed(call) for call in calls]


class Fit:
    """Measured launches, and how a model does on them."""

    def __init__(self, rows: Sequence[Row], sm_count: int) -> None:
        self.sm_count = sm_count
        self.launches = [Launch(**{key: value for key, value in row.items() if key != "us"}) for row in rows]
        self.us = [float(row["us"]) for row in rows]
        self.shapes: dict[tuple, list[int]] = {}
        for number, launch in enumerate(self.launches):
            self.shapes.setdefault(launch.shape, []).append(number)
        best = {shape: min(self.us[n] for n in numbers) for shape, numbers in self.shapes.items()}
        # The good launches of a shape count: nobody takes the others.
        self.weights = [(best[launch.shape] / us) ** 2 / us for launch, us in zip(self.launches, self.us, strict=True)]
        self.best = best

    def modelled(self, model: Model) -> list[float]:
        return [launch.modelled(model, self.sm_count) for launch in self.launches]

    def losses(self, times: Sequence[float]) -> dict[tuple, float]:
        """How much slower than the best measured launch of a shape the one is that these times choose: 0.04 is 4 %."""
        chosen = {shape: min(numbers, key=times.__getitem__) for shape, numbers in self.shapes.items()}
        return {shape: self.us[number] / self.best[shape] - 1 for shape, number in chosen.items()}

    def badness(self, times: Sequence[float]) -> float:
        """Wrong choices first, then wrong times; what every launch costs is taken out of those."""
        common = sum(w * (us - t) for w, us, t in zip(self.weights, self.us, times, strict=True)) / sum(self.weights)
        off = sum((w * (t + common - us)) ** 2 for w, us, t in zip(self.weights, self.us, times, strict=True))
        return off + sum(20 * loss + 200 * loss**2 for loss in self.losses(times).values())


def fit(rows: Sequence[Row], sm_count: int, steps: int = STEPS) -> Model:
    """The constants that choose best among the launches measured: a random walk from those of the H200.

    The same rows give the same constants.
    """
    judge, generator = Fit(rows, sm_count), random.Random(0)
    numbers = _numbers(MODEL)
    least = judge.badness(judge.modelled(MODEL))
    for step in range(steps):
        if step % 500 == 0:
            progress(f"fitting: {step}/{steps}")
        width = 0.3 * 0.6 ** (10 * step / steps)
        tried = [_digits(n * math.exp(generator.gauss(0, width))) if generator.random() < 0.2 else n for n in numbers]
        badness = judge.badness(judge.modelled(_model(tried)))
        if badness < least:
            numbers, least = tried, badness
    progress("")
    return _model(numbers)


def _digits(number: float) -> float:
    """As `source` prints it: what is judged is what is taken."""
    return float(f"{number:.3g}")


def _numbers(model: Model) -> list[float]:
    return [number for cost in model.blocks.values() for number in cost] + list(model[1:-1])


def _model(numbers: Sequence[float]) -> Model:
    costs = (Cost(*numbers[3 * n : 3 * n + 3]) for n in range(len(MODEL.blocks)))
    # Every launch costs `launch`: nothing to tell from one of them.
    return Model(dict(zip(MODEL.blocks, costs, strict=True)), *numbers[3 * len(MODEL.blocks) :], MODEL.launch)


def source(model: Model) -> str:
    """The model as overlay/kernel/plan.py states it."""
    blocks = "".join(f'        "{name}": Cost({", ".join(map(str, cost))}),\n' for name, cost in model.blocks.items())
    rest = "".join(f"    {name}={getattr(model, name)},\n" for name in Model._fields[1:])
    return f"MODEL = Model(\n    blocks={{\n{blocks}    }},\n{rest})"


def cells(rows: Sequence[Row], sm_count: int, fitted: Model) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each shape: its fastest launch, and how much slower the chosen ones are."""
    judge = Fit(rows, sm_count)
    now, then = (judge.losses(judge.modelled(model)) for model in (MODEL, fitted))
    table = []
    for shape, numbers in judge.shapes.items():
        best = judge.launches[min(numbers, key=judge.us.__getitem__)]
        fastest = f"{best.variant} x {best.splits}"
        losses = (f"{100 * loss[shape]:.1f} %" for loss in (now, then))
        table.append((*map(str, shape), f"{judge.best[shape]:.1f}", fastest, *losses))
    return ("H", "T", "KV", "us", "fastest launch", "now", "fitted"), table
