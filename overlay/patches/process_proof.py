"""process_proof: no engine reports ready while one of its processes runs another overlay, or none."""

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present
from overlay.errors import OverlayError

CORE = "vllm.v1.engine.core"
TARGET = "EngineCore._initialize_kv_caches"
# The workers have just loaded the model and wait for work: they answer in milliseconds, unless one hangs.
TIMEOUT_S = 300.0


class RanksDiffer(OverlayError):
    """The processes of one engine do not run the same overlay."""


def answer(worker: object) -> dict[str, object] | None:
    """Runs in each worker: what its overlay is made of, or None where there is none.

    Sent by value, because a worker without the overlay cannot import it: only the standard library is sure to be there.
    """
    import os
    import sys

    startup = sys.modules.get("overlay.startup")
    overlay = startup.current() if startup is not None else None
    if overlay is None:
        return None
    from overlay.fingerprint import parts

    return {"pid": os.getpid(), "fingerprint": overlay.fingerprint, "parts": parts(overlay.entries)}


def compare(answers: Sequence[dict[str, object] | None], reference: dict[str, object]) -> list[str]:
    """One sentence for every rank whose overlay differs from `reference`, with what differs; empty where none does."""
    problems = []
    for rank, said in enumerate(answers):
        if said is None:
            problems.append(f"rank {rank} runs without the overlay: PYTHONPATH is not set in its environment")
        elif said["fingerprint"] != reference["fingerprint"]:
            found = "; ".join(differences(said["parts"], reference["parts"]))
            problems.append(f"rank {rank} (pid {said['pid']}) differs: {found}")
    return problems


def differences(ours: object, theirs: object, name: str = "") -> list[str]:
    """`patches.sparse_mla.state: off, not on` for every leaf in which two nested dictionaries differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted({*ours, *theirs})
        return [
            text for key in keys for text in differences(ours.get(key), theirs.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if ours == theirs else [f"{name}: {ours}, not {theirs}"]


def ask(collective_rpc: Callable) -> list[dict[str, object] | None]:
    """Every worker's answer, in rank order."""
    import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return collective_rpc(answer, timeout=TIMEOUT_S)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def prove(module: ModuleType, ctx: Context) -> None:
    def ask_first(wrapped: Callable, core: object, args: tuple, kwargs: dict) -> object:
        answers = ask(core.model_executor.collective_rpc)
        own = answer(None)
        # A head node without a GPU decides differently about the hardware; then the ranks answer to the first of them.
        reference = own if ctx.hardware.capability is not None else next(filter(None, answers), own)
        problems = compare(answers, reference)
        if problems:
            raise RanksDiffer(
                "this engine's processes do not run the same overlay, and it must not answer:\n  "
                + "\n  ".join(problems)
                + f"\n  the engine core (pid {os.getpid()}) has fingerprint {reference['fingerprint']}; "
                "set the same PYTHONPATH, OVERLAY_ variables and patches.toml for every process on every node"
            )
        ctx.log.info("%d of %d workers run overlay %s", len(answers), len(answers), reference["fingerprint"])
        return wrapped(*args, **kwargs)

    ctx.wrap(module, TARGET, ask_first)


def probe(ctx: Context) -> Verdict:
    if not ctx.sources.has(CORE):
        return absent("this vLLM has no V1 engine core")
    return present("vLLM compares nothing that its workers were started with")


PATCH = Patch(
    id="process_proof",
    title="an engine of which one process runs unpatched, or differently patched, and answers anyway",
    why=(
        "An engine is many processes on one or more machines. A worker that was started without PYTHONPATH, or with "
        "another patches.toml, loads and serves: Ray copies environment variables after the interpreter has started, a "
        "second node has an older checkout. Its share of every answer is then computed by other code."
    ),
    how=(
        "Wraps EngineCore._initialize_kv_caches, which runs after the workers have loaded the model and before the "
        "engine reports ready. Each worker is asked through Executor.collective_rpc for its fingerprint, by a function "
        "that travels by value; a difference stops the engine, naming the rank and what differs."
    ),
    upstream=(),
    until="never: it is this overlay that must be the same everywhere",
    targets=(
        Target(CORE, TARGET, ("(self, vllm_config)",)),
        Target(
            "vllm.v1.executor.abstract",
            "Executor.collective_rpc",
            ("(self, method, timeout=..., args=..., kwargs=..., non_block=...)",),
        ),
    ),
    probe=probe,
    apply={CORE: prove},
)
