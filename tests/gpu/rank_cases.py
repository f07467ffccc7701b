"""Engines of several ranks: what is started, what each is compared with, and how a comparison is judged."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu.engine_cases import EngineCase, compare, finite, no_numbers, tolerances

# Under decode context parallelism vLLM asks for a multiple of the indexer's pool of 4 positions.
SMALLEST_INTERLEAVE = 4
FOUR_GPUS = "for want of four GPUs"
CUTEDSL = "because vLLM merges selections over ranks with CuteDSL (nvidia-cutlass-dsl) only"
NO_FUSION = {"fuse_allreduce_rms": False}  # FlashInfer's fused all-reduce, through NVLink multicast


@dataclass(frozen=True)
class RankCase:
    """One engine. `odd` is what its last rank is started with: another switch ("switch"), or nothing ("none")."""

    name: str
    tp: int
    rows: str = "bf16"
    heads: int = 64
    eager: bool = True
    stock: bool = False
    dcp: int = 1
    interleave: int = SMALLEST_INTERLEAVE
    odd: str | None = None
    refusal: str | None = None  # words of the error that must stop it
    control: bool = False  # once more with the first rank's share of the context lost

    @property
    def engine(self) -> EngineCase:
        """The same engine with one rank."""
        return EngineCase(self.name, self.rows, heads=self.heads, eager=self.eager)

    @property
    def checkpoint(self) -> str:
        return self.engine.checkpoint

    def engine_arguments(self, folder: str, kv_cache_dtype: str) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`; see EngineCase."""
        arguments = self.engine.engine_arguments(folder, kv_cache_dtype)
        arguments["tensor_parallel_size"] = self.tp
        # NCCL everywhere: vLLM's own all-reduce needs NVLink between more than two cards, which cards of 12.x lack.
        arguments["disable_custom_all_reduce"] = True
        arguments.setdefault("compilation_config", {})["pass_config"] = NO_FUSION
        if self.dcp > 1:
            arguments |= {
                "decode_context_parallel_size": self.dcp,
                "cp_kv_cache_interleave_size": self.interleave,
            }
        return arguments


def _references() -> list[RankCase]:
    ours = [
        RankCase("tp1 64 bf16", 1),
        RankCase("tp1 64 fp8", 1, rows="fp8"),
        RankCase("tp1 32 bf16", 1, heads=32),
    ]
    return ours + [replace(case, name=f"stock {case.name}", stock=True) for case in ours]


def _tensor_parallel(tp: int) -> list[RankCase]:
    """Two ranks take 64 and 32 heads of bf16, four ranks 64 heads of both kinds of rows; eager and with graphs."""
    shapes = [("bf16", 64), ("bf16", 32)] if tp == 2 else [("bf16", 64), ("fp8", 64)]
    ours = [
        RankCase(f"tp{tp} {heads} {rows} {'eager' if eager else 'graphs'}", tp, rows, heads, eager)
        for eager in (False, True)
        for rows, heads in shapes
    ]
    stock = [RankCase(f"stock tp{tp} {heads} {rows}", tp, rows, heads, stock=True) for rows, heads in shapes]
    return [*ours, *stock]


DCP_2 = [
    RankCase("tp2 dcp2 bf16 eager", 2, dcp=2, control=True),
    RankCase("tp2 dcp2 bf16 graphs", 2, dcp=2, eager=False, interleave=64),
    RankCase("tp2 dcp2 interleave 1", 2, dcp=2, interleave=1, refusal="cp-kv-cache-interleave-size"),
]
DCP_2X2 = [
    RankCase("tp4 dcp2 bf16 graphs", 4, dcp=2, eager=False),
    RankCase("tp4 dcp2 fp8 eager", 4, rows="fp8", dcp=2, interleave=64),
]
ODD = {
    2: [
        RankCase("tp2 another switch", 2, odd="switch", refusal="rank 1 (pid"),
        RankCase("tp2 without overlay", 2, odd="none", refusal="rank 1 runs without the overlay"),
    ],
    4: [RankCase("tp4 without overlay", 4, odd="none", refusal="rank 3 runs without the overlay")],
}


def cases(gpus: int) -> list[RankCase]:
    """Everything that a machine of `gpus` GPUs can run; those that the most others are compared with come first."""
    found = _references()
    if gpus >= 4:
        found += [*_tensor_parallel(4), *DCP_2X2, *ODD[4]]
    if gpus >= 2:
        found += [*_tensor_parallel(2), *DCP_2, *ODD[2]]
    return found


def not_run(gpus: int, cutedsl: bool, names: Collection[str] | None = None) -> dict[str, str]:
    """Why a case is not run, by name. `names`: those that were asked for, None for all."""
    here = {case.name for case in cases(gpus)}
    reasons = {}
    for case in cases(4):
        if case.name not in here:
            reasons[case.name] = FOUR_GPUS
        elif case.dcp > 1 and case.refusal is None and not cutedsl:
            reasons[case.name] = CUTEDSL
        elif names is not None and case.name not in names:
            reasons[case.name] = "because it was not asked for"
    return reasons


def left_out(reasons: Mapping[str, str], gpus: int, names: Collection[str] | None = None) -> dict[str, list[str]]:
    """Reason -> cases that should have run and did not: all that were asked for, but those beyond `gpus` GPUs.

    `gpus` is what the caller promised to have: on fewer than four, what needs four is excused, unless asked by name.
    """
    return by_reason(
        {
            name: why
            for name, why in reasons.items()
            if (name in names if names is not None else why != FOUR_GPUS or gpus >= 4)
        }
    )


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of what was not run, by why."""
    return {reason: [n for n, why in reasons.items() if why == reason] for reason in dict.fromkeys(reasons.values())}


def reference(case: RankCase) -> str:
    """The engine that `case` must answer like: one rank, as many without context parallelism; one rank: vLLM's."""
    if case.tp == 1:
        return f"stock {case.name}"
    if case.dcp > 1:
        return f"tp{case.tp} {case.heads} {case.rows} eager"
    return f"tp1 {case.heads} {case.rows}"


def noise(case: RankCase) -> tuple[str, str]:
    """Two engines with vLLM's own backend; what several ranks change in their answers is the engine's own noise.

    For one rank they are the same engine: nothing is allowed beyond the tolerance.
    """
    return f"stock tp1 {case.heads} {case.rows}", f"stock tp{case.tp} {case.heads} {case.rows}"


def judge(case: RankCase, results: dict[str, dict]) -> dict[str, Any]:
    """The verdict on one case; `problems` is empty where it did what it must."""
    verdict: dict[str, Any] = {"name": case.name, "tp": case.tp, "dcp": case.dcp, "problems": []}
    result = results.get(case.name, {"error": "no answer"})
    if case.refusal is not None:
        return verdict | _judge_refusal(case, result)
    if "error" in result:
        return verdict | {"problems": [result["error"]]}
    verdict["seconds"] = result["seconds"]
    verdict["ranks"] = [{**rank, "layers": rank["layers"][:1]} for rank in result["ranks"]]
    verdict["problems"] = _ranks_problems(case, result["ranks"])
    if case.stock:
        verdict["problems"] += no_numbers(result["answers"])
        return verdict
    others = (reference(case), *noise(case))
    missing = [name for name in others if "answers" not in results.get(name, {})]
    if missing:
        verdict["problems"].append(f"cannot be compared without {', '.join(missing)}")
        return verdict
    expected, one, several = (results[name]["answers"] for name in others)
    return verdict | _judge_answers(case, result, expected, one, several, verdict["problems"])


def _judge_refusal(case: RankCase, result: dict) -> dict[str, Any]:
    said = result.get("error", "")
    if case.refusal in said:
        return {"refused": said[:600], "problems": []}
    return {"problems": [f"should be refused with {case.refusal!r}, but: {said[:600] or 'it served'}"]}


def _ranks_problems(case: RankCase, ranks: list[dict]) -> list[str]:
    problems = []
    if len(ranks) != case.tp or len({rank["pid"] for rank in ranks}) != case.tp:
        problems.append(f"{len(ranks)} ranks answered, not {case.tp}")
    if len({rank["fingerprint"] for rank in ranks}) != 1 or (ranks[0]["fingerprint"] is None) != case.stock:
        problems.append(f"fingerprints: {[rank['fingerprint'] for rank in ranks]}")
    backends = {layer["backend"] for rank in ranks for layer in rank["layers"]}
    if (backends == {"OVERLAY_SPARSE_MLA"}) == case.stock:
        problems.append(f"ran on {', '.join(sorted(backends))}")
    heads = {layer["heads"] for rank in ranks for layer in rank["layers"]}
    if heads != {case.heads // case.tp}:
        problems.append(f"{heads} heads a rank, not {case.heads // case.tp}")
    if {layer["dcp"] for rank in ranks for layer in rank["layers"]} != {case.dcp}:
        problems.append("the layers do not run under the decode context parallelism that was asked for")
    return problems


def _judge_answers(
    case: RankCase, result: dict, expected: list[dict], one: list[dict], several: list[dict], problems: list[str]
) -> dict[str, Any]:
    tolerance = EngineCase(case.name, case.rows).tolerance
    allowed = tolerances(one, several, tolerance)
    for name, answers in dict(zip(noise(case), (one, several), strict=True)).items():
        problems += [f"{name} is no yardstick: {problem}" for problem in no_numbers(answers)]
    stock = compare(one, several, [tolerance] * len(one))
    found = compare(expected, result["answers"], allowed)
    verdict = {
        "against": reference(case),
        "allowed_by_prompt": allowed,
        "largest_by_prompt": [finite(value) for value in found.by_prompt],
        "generated_tokens": found.tokens,
        "prompt_tokens": found.prompt_tokens,
        "ties": found.ties,
        "largest_generated_difference": finite(found.largest_generated),
        "largest_logprob_difference": finite(found.largest),
        "jumps": len(found.jumps),
        "stock_beyond_tolerance": len(stock.jumps),
        "stock_largest_by_prompt": [finite(value) for value in stock.by_prompt],
        "stock_largest_logprob_difference": finite(stock.largest),
        "problems": problems + found.problems,
    }
    if "control" in result:
        control = compare(expected, result["control"], allowed)
        verdict["control_largest_logprob_difference"] = finite(control.largest)
        if not control.problems:
            verdict["problems"].append("the control passed although a rank's share of the context was left out")
    return verdict
