"""How the figures of servers under load are judged. Pure: no network, no GPU."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
# An answer may differ from itself alone as vLLM's own does under the same load: as often (twice, and one of 200), and
# as far (twice).
MORE_OFTEN, SPARE_SHARE, FURTHER = 2.0, 0.005, 2.0
GROWTH_MIB = {"gpu": 64.0, "host": 96.0}  # an allocator's next block, and Python's heap, of all processes of a server

Figures = Mapping[str, Any]


def judge(ours: Figures, stock: Figures | None) -> list[str]:
    """Everything that is not as it must be; empty where nothing is.

    `stock`: vLLM's own server under the same load, whose noise widens what ours is allowed. Without it (None: it does
    not serve this model here) the plain tolerance is all. Nothing that ours does widens a bound of ours.
    """
    problems = [*ours["problems"], *refusal_problems(ours, stock), *noise_problems(ours, stock)]
    problems += growth_problems(ours["memory_growth_mib"], stock and stock["memory_growth_mib"])
    problems += [f"{name} is {value} when nobody asks" for name, value in ours["left_when_idle"].items() if value]
    if len(ours["left_when_idle"]) != len(METRICS):
        problems.append(f"/metrics has only {', '.join(ours['left_when_idle']) or 'nothing'} of {', '.join(METRICS)}")
    if ours["exit"] is not None:
        problems.append(f"the server ended with status {ours['exit']}")
    if ours["alone_again"] > furthest(ours, stock):
        problems.append(f"alone, after the load, an answer differs by {ours['alone_again']:.3f} from before")
    for kind in ("answered", "aborted", "cancelled", "malformed"):
        if not ours["requests"].get(kind):
            problems.append(f"no request was {kind}: the load is not what it should be")
    for side, figures in (("ours", ours), ("stock", stock)):
        if figures and figures["load_seconds"] < figures["asked_seconds"]:
            lasted = f"{max(0.0, figures['load_seconds']):.0f} s, not {figures['asked_seconds']:.0f}"
            problems.append(f"the load on {side} lasted {lasted}: --budget has no room for more")
    return problems


def refusal_problems(ours: Figures, stock: Figures | None) -> list[str]:
    """Malformed requests that were not refused with a 4xx, unless vLLM's own server answers them in the same way."""
    return [
        f"{name}: answered with {status}"
        for name, counts in ours["refusals"].items()
        for status in counts
        if not status.startswith("4") and status not in (stock or {"refusals": {}})["refusals"].get(name, {})
    ]


def furthest(ours: Figures, stock: Figures | None) -> float:
    """How far one of our answers may be from itself alone: of our figures only the tolerance is in it."""
    noise = stock["largest_difference"] if stock else 0.0
    return FURTHER * max(ours["tolerance"], noise if math.isfinite(noise) else 0.0)


def noise_problems(ours: Figures, stock: Figures | None) -> list[str]:
    """Where our answers under load differ from themselves alone by more than is allowed; figures of both."""
    if not all(figures["compared_answers"] for figures in (ours, stock) if figures):
        return ["nothing was compared"]
    problems = []
    if stock and not math.isfinite(stock["largest_difference"]):
        problems.append("a log-probability of vLLM's own answers is no number: they are no yardstick")
    share, theirs = (side["beyond_tolerance"] / side["compared_answers"] if side else 0.0 for side in (ours, stock))
    allowed = MORE_OFTEN * theirs + SPARE_SHARE
    if share > allowed:
        problems.append(f"{share:.2%} of our answers differ from themselves alone, allowed are {allowed:.2%}")
    bound = furthest(ours, stock)
    if ours["largest_difference"] > bound:
        problems.append(
            f"an answer differs by {ours['largest_difference']:.3f} from itself alone, allowed is {bound:.3f}"
        )
    return problems


@dataclass(frozen=True)
class Sample:
    """Memory of all processes of a server at one moment, MiB; None where it cannot be read."""

    at: float  # seconds since the load began
    gpu: float | None
    host: float


def growth(samples: Sequence[Sample], seconds: float) -> dict[str, float | None]:
    """From the second quarter to the last one of `seconds`, medians, MiB. The first quarter is the warm-up."""
    found: dict[str, float | None] = {}
    for kind in ("gpu", "host"):
        values = [(sample.at / seconds, getattr(sample, kind)) for sample in samples]
        early = [value for at, value in values if 0.25 <= at < 0.5 and value is not None]
        late = [value for at, value in values if at >= 0.75 and value is not None]
        found[kind] = round(statistics.median(late) - statistics.median(early), 1) if early and late else None
    return found


def growth_problems(ours: Mapping[str, float | None], stock: Mapping[str, float | None] | None) -> list[str]:
    """Growth beyond an allocator's last block; what vLLM's own server grows by under the same load is its own."""
    problems = []
    for kind, limit in GROWTH_MIB.items():
        grown, theirs = ours[kind], max(0.0, (stock or {}).get(kind) or 0.0)
        if grown is None:
            problems.append(f"{kind} memory was not read")
        elif grown > limit + theirs:
            problems.append(
                f"{kind} memory grew by {grown:.0f} MiB after the warm-up, allowed are {limit + theirs:.0f}"
            )
    return problems
