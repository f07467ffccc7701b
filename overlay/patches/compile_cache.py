"""compile_cache: vLLM's persisted artifacts are keyed by the overlay, so a toggle never meets a stale one."""

import hashlib
from types import ModuleType
from typing import Any

from overlay import startup
from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, present
from overlay.fingerprint import fingerprint

ENVS = "vllm.envs"
PLAN = "vllm.v1.worker.startup_plan"
FACTOR = "OVERLAY_FINGERPRINT"


def probe(ctx: Context) -> Verdict:
    return present("the keys of vLLM's persisted artifacts do not see changes that are made at import")


def own_fingerprint() -> str:
    """This process's overlay: its code, patches with their states and options, kernel source."""
    return fingerprint(startup.current().entries)


def add_factor(module: ModuleType, ctx: Context) -> None:
    """Both caches of torch.compile artifacts, piecewise and ahead of time, hash what this function returns."""

    def factors(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> dict[str, object]:
        return {**wrapped(*args, **kwargs), FACTOR: own_fingerprint()}

    ctx.wrap(module, "compile_factors", factors)


def key_the_plan(module: ModuleType, ctx: Context) -> None:
    """A persisted start-up plan replays the KV cache size of an earlier boot, which other patches change."""

    def key(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> str:
        return hashlib.sha256(f"{wrapped(*args, **kwargs)} {own_fingerprint()}".encode()).hexdigest()[:16]

    ctx.wrap(module, "compute_plan_fingerprint", key)


PATCH = Patch(
    id="compile_cache",
    title="compiled artifacts of another patch set are reused",
    why=(
        "vLLM keys its torch.compile caches by environment, configuration and the text of traced files. A function "
        "that was replaced at import changes none of them: after a toggle a stale artifact is loaded and greedy output "
        "drifts. The start-up plan (VLLM_ENABLE_STARTUP_PLAN) replays another patch set's KV cache size likewise."
    ),
    how=(
        "The overlay's fingerprint (its code, each patch's state and options, kernel source) is one more factor of "
        "vllm.envs.compile_factors, which both compile caches hash, and of the start-up plan's key."
    ),
    upstream=(),
    until="never: it describes this overlay, not a fault of vLLM alone",
    targets=(
        Target(ENVS, "compile_factors", ("()",)),
        Target(PLAN, "compute_plan_fingerprint", ("(vllm_config, rank, world_size)",), optional=True),
    ),
    probe=probe,
    apply={ENVS: add_factor, PLAN: key_the_plan},
)
