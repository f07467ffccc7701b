"""The engines that are compared, the prompts they get, and how close they must be."""

import math
import random
import string
from dataclasses import dataclass, field

# From two pools of the indexer to six times its top-k, with both sides of its edges: 2048 of top-k, 2048 of a chunk.
PROMPT_LENGTHS = (7, 64, 501, 2047, 2050, 4099, 8192, 12000)
NEW_TOKENS = 24
# Bytes that the tiny model can also say. It holds all others down by logits near -32, where bf16 steps are 1/8: their
# log-probabilities would differ by more than any tolerance between engines that agree.
SPOKEN = sorted({*string.ascii_letters.encode(), *string.digits.encode(), *string.punctuation.encode(), *b" \n"})

LOGPROB_TOLERANCE = {"bf16": 0.02, "fp8": 0.1}
# Prompt positions that may differ by more: an expert router is a step, and two experts within rounding of each other
# change places. On an H200 1 to 5 of 28,952 positions did, and vLLM's own engine against itself had 1 (by 0.40).
JUMP_SHARE = 2e-4
# Eight layers carry rounding on that four would end with: up to 0.06 was measured within 2048 tokens of context.
DEEP_TOLERANCE = 0.1


@dataclass(frozen=True)
class EngineCase:
    """One configuration, run with vLLM's own backend and with ours."""

    name: str
    rows: str  # "bf16" or "fp8"
    heads: int = 16
    layers: int = (
        4  # one of four is sparse MLA. A second one selects by what the first computed, and so amplifies noise
    )
    eager: bool = False
    graph_mode: str | None = None  # None: vLLM's default
    speculative_tokens: int = 0
    control: bool = False  # once more on the same engine with our attention's output zeroed

    @property
    def nested(self) -> bool:
        """vLLM speculates for the nested form of the model only."""
        return self.speculative_tokens > 0

    @property
    def tolerance(self) -> float:
        return LOGPROB_TOLERANCE[self.rows] if self.layers == 4 else DEEP_TOLERANCE

    @property
    def row_dtype(self) -> str:
        """--kv-cache-dtype of these rows."""
        return {"bf16": "bfloat16", "fp8": "fp8"}[self.rows]

    @property
    def checkpoint(self) -> str:
        return f"tiny-{self.heads}-{self.layers}{'-mtp' if self.nested else ''}"

    def engine_arguments(self, folder: str, kv_cache_dtype: str) -> dict:
        """Keyword arguments of `vllm.LLM`. Chunks of 2048 make every long prompt meet decodes of the others."""
        arguments = dict(
            model=folder,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=12288,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
            enforce_eager=self.eager,
            # A fixed cache, so that engines sharing a GPU do not see each other in their memory profiles.
            gpu_memory_utilization=0.03,
            kv_cache_memory_bytes=1 << 30,
            enable_flashinfer_autotune=False,  # minutes at every first start, for kernels that are not compared
            seed=0,
        )
        if not self.eager:
            step = 1 + self.speculative_tokens
            compilation = {"cudagraph_capture_sizes": [step * n for n in (1, 2, 4, 8)]}
            if self.graph_mode:
                compilation["cudagraph_mode"] = self.graph_mode
            arguments["compilation_config"] = compilation
        if self.nested:
            arguments["language_model_only"] = True
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.speculative_tokens}
        return arguments


CASES = (
    EngineCase("bf16 eager", "bf16", eager=True, control=True),
    EngineCase("bf16 graphs", "bf16"),
    EngineCase("fp8 graphs", "fp8", graph_mode="FULL_DECODE_ONLY"),
    EngineCase("bf16 MTP", "bf16", speculative_tokens=2),
    EngineCase("bf16 64 heads", "bf16", heads=64),
    EngineCase("fp8 8 heads", "fp8", heads=8),
    EngineCase("bf16 two layers", "bf16", layers=8),  # two sparse layers share the scratch and the index rows
)
BY_NAME = {case.name: case for case in CASES}


def prompts() -> list[list[int]]:
    """Random bytes, the same in every process; token ids, so no tokenizer stands between the engines."""
    generator = random.Random(20240)
    return [generator.choices(SPOKEN, k=length) for length in PROMPT_LENGTHS]


@dataclass
class Difference:
    """What a comparison of two engines' answers found. `by_prompt` has the largest difference of each."""

    tokens: int = 0  # generated tokens whose whole context was the same in both
    prompt_tokens: int = 0
    jumps: list[tuple[int, int, float]] = field(
        default_factory=list
    )  # prompt, position, difference beyond what is allowed
    largest: float = 0.0  # difference of a log-probability, generated or of the prompt
    largest_generated: float = 0.0
    sum: float = 0.0
    by_prompt: list[float] = field(default_factory=list)
    ties: int = 0  # differing tokens that the stock engine held for equal within the noise
    problems: list[str] = field(default_factory=list)

    def see(self, difference: float) -> float:
        """Count one difference and return it; a NaN is none that any tolerance allows."""
        difference = math.inf if math.isnan(difference) else difference
        self.largest = max(self.largest, difference)
        self.by_prompt[-1] = max(self.by_prompt[-1], difference)
        self.sum += difference
        return difference


def tolerances(stock: list[dict], again: list[dict], tolerance: float) -> list[float]:
    """What each prompt is allowed: `tolerance`, or where the stock engine itself does not repeat its answer, 1.5 times
    by how much it differs. Up to 2048 tokens of context it repeats to the bit; beyond, its top-k breaks ties by chance.
    A NaN among its answers allows nothing: see `no_numbers`.
    """
    noise = compare(stock, again, [math.inf] * len(stock)).by_prompt
    return [max(tolerance, 1.5 * value) if math.isfinite(value) else tolerance for value in noise]


def no_numbers(answers: list[dict]) -> list[str]:
    """A problem for each prompt whose answer has a log-probability or margin that is NaN or infinite.

    The stock engine's answers are what everything is measured by: such an engine is broken, and no yardstick.
    """
    return [
        f"prompt {number}: a log-probability is no number"
        for number, answer in enumerate(answers)
        if not all(map(math.isfinite, (*answer["logprobs"], *answer["margins"], *answer["prompt_logprobs"])))
    ]


def finite(value: float) -> float | str:
    """JSON has no infinity, which a NaN among the answers counts as."""
    return value if math.isfinite(value) else str(value)


def compare(stock: list[dict], ours: list[dict], allowed: list[float]) -> Difference:
    """Compare the answers to the same prompts: tokens while their contexts agree, and every log-probability.

    A differing token is a problem where the stock engine's best two are further apart than both engines' noise
    together, twice what the prompt is `allowed`. After a differing token the contexts differ, so the rest of that
    answer is left out.
    """
    found = Difference()
    if len(stock) != len(ours):
        found.problems.append(f"{len(stock)} answers against {len(ours)}")
    for number, (a, b, tolerance) in enumerate(zip(stock, ours, allowed, strict=False)):
        found.by_prompt.append(0.0)
        for position, (x, y) in enumerate(zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)):
            found.prompt_tokens += 1
            if found.see(abs(x - y)) > tolerance:
                found.jumps.append((number, position, abs(x - y)))
        largest = 0.0
        for step, (token_a, token_b) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            if token_a != token_b:
                margin = a["margins"][step]
                if margin > 2 * tolerance:
                    found.problems.append(
                        f"prompt {number}, token {step}: {token_a} became {token_b}, margin {margin:.3f}"
                    )
                found.ties += 1
                break
            found.tokens += 1
            largest = max(largest, found.see(abs(a["logprobs"][step] - b["logprobs"][step])))
        found.largest_generated = max(found.largest_generated, largest)
        if largest > tolerance:
            found.problems.append(
                f"prompt {number}: log-probabilities of its answer differ by up to {largest:.4f}, "
                f"allowed is {tolerance:.4f}"
            )
    if len(found.jumps) > JUMP_SHARE * found.prompt_tokens:
        worst = max(found.jumps, key=lambda jump: jump[2])
        found.problems.append(
            f"{len(found.jumps)} of {found.prompt_tokens} prompt log-probabilities differ by more than is allowed, "
            f"the worst by {worst[2]:.4f} (prompt {worst[0]}, position {worst[1]})"
        )
    if found.tokens == 0:
        found.problems.append("no generated token could be compared")
    return found
