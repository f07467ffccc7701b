"""process_proof: no engine reports ready while one of its processes runs another overlay, or none."""

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from overlay import startup
from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present
from overlay.errors import OverlayError
from overlay.fingerprint import software

CORE = "vllm.v1.engine.core"
TARGET = "EngineCore._initialize_kv_caches"
PARALLEL = "vllm.config.parallel"
LAUNCHED = ("vllm.v1.executor.uniproc_executor", "ExecutorWithExternalLauncher")
# The workers have just loaded the model and wait for work: they answer in milliseconds, unless one hangs.
TIMEOUT_S = 300.0
# Ranks of an external launcher come here when each has loaded the model. vLLM's own collective, which follows, waits as
# long by default. Who is missing is named every minute.
LAUNCHED_TIMEOUT_S, LAUNCHED_REMINDER_S = 1800.0, 60.0
_engines = itertools.count()  # a process may make one engine after another: all ranks count alike

Answer = Mapping[str, Any]


class RanksDiffer(OverlayError):
    """The processes of one engine do not run the same overlay."""


def answer(worker: object) -> dict[str, Any] | None:
    """Runs in each worker: what its overlay is made of and does, or None where there is none.

    Sent by value, because a worker without the overlay cannot import it: only the standard library is sure to be there.
    Of the worker's own overlay only what it says of itself: it may be an older one.
    """
    import os
    import sys

    startup = sys.modules.get("overlay.startup")
    overlay = startup.current() if startup is not None else None
    if overlay is None:
        return None
    try:
        from overlay.patches.process_proof import describe

        return describe(overlay)
    except Exception as error:
        return {"pid": os.getpid(), "cannot say": f"{type(error).__name__}: {error}"}


def process() -> str:
    """Tells processes apart on whatever machine and in whatever container: two of those may use the same pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:  # no /proc
        return f"{socket.gethostname()} {os.getpid()}"


def describe(overlay: startup.ArmedOverlay) -> dict[str, Any]:
    """`process`, `pid`, `fingerprint` and the `parts` it is made of, those that no GPU decides, and what is not as
    decided."""
    from overlay.fingerprint import parts, parts_without_gpu

    return {
        "process": process(),
        "pid": os.getpid(),
        "fingerprint": overlay.fingerprint,
        "parts": parts(overlay.entries),
        "without a GPU": parts_without_gpu(overlay.entries),
        "astray": {entry.patch.id: why for entry in overlay.entries if (why := entry.astray())},
    }


def compare(answers: Sequence[Answer | None], own: Answer, has_gpu: bool = True, strict: bool = True) -> list[str]:
    """One sentence for everything that keeps these ranks from serving together with an engine core that says `own`.

    A core without a GPU decides differently about the hardware. Its ranks then answer to the first of them, and to the
    core for what no GPU decides.
    """
    able = [said for said in answers if said is not None and "cannot say" not in said]
    reference = own if has_gpu else next(iter(able), own)
    problems = []
    for rank, said in enumerate(answers):
        if said is None:
            problems.append(f"rank {rank} runs without the overlay: PYTHONPATH is not set in its environment")
            continue
        who = f"rank {rank} (pid {said['pid']})"
        if "cannot say" in said:
            problems.append(f"{who} runs another version of the overlay, which cannot answer ({said['cannot say']})")
            continue
        found = differences(said["parts"], reference["parts"])
        if not has_gpu:
            found += differences(said["without a GPU"], own["without a GPU"])
        if found:
            problems.append(f"{who} differs: {'; '.join(dict.fromkeys(found))}")
    return problems + [
        f"{who}: {name} is not what was decided: {why}" for who, name, why in astray(answers, own, strict)
    ]


def astray(answers: Sequence[Answer | None], own: Answer, strict: bool) -> list[tuple[str, str, str]]:
    """Process, patch and reason of what failed or was bypassed since `import vllm`.

    With `strict = false` the user takes an engine without a patch that failed, but not one of which a part has it.
    """
    said = {rank: each.get("astray", {}) for rank, each in enumerate(answers) if each is not None}
    accepted = set() if strict else set.intersection(*map(set, said.values())) if said else set()
    found = [
        (f"rank {rank} (pid {answers[rank]['pid']})", name, why)
        for rank, patches in said.items()
        for name, why in patches.items()
        if name not in accepted
    ]
    if strict and own["process"] not in {answers[rank].get("process") for rank in said}:
        found += [(f"the engine core (pid {own['pid']})", name, why) for name, why in own["astray"].items()]
    return found


def differences(ours: object, theirs: object, name: str = "") -> list[str]:
    """`patches.sparse_mla.state: off, not on` for every leaf in which two nested dictionaries differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted({*ours, *theirs})
        return [
            text for key in keys for text in differences(ours.get(key), theirs.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if ours == theirs else [f"{name}: {ours}, not {theirs}"]


def ask(collective_rpc: Callable) -> list[dict[str, Any] | None]:
    """Every worker's answer, in rank order."""
    import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return collective_rpc(answer, timeout=TIMEOUT_S)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def launched_from_outside(executor: object) -> bool:
    """Every rank is an engine of its own, made by torchrun or the like: its executor reaches one worker, itself."""
    module, name = LAUNCHED
    return module in sys.modules and isinstance(executor, getattr(sys.modules[module], name))


def meet(ctx: Context, own: Answer) -> list[dict[str, Any]]:
    """The answers of all ranks of an external launcher, in rank order, through the store that they met in.

    Not through a collective: a rank without the overlay would take part in it with vLLM's next one, which reduces the
    memory of all ranks over the same group, and both would return garbage. A rank that says nothing is refused by name.
    """
    from torch.distributed.distributed_c10d import _get_process_group_store
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    store, engine = _get_process_group_store(world.cpu_group), next(_engines)
    keys = [f"overlay/{engine}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank_in_group], json.dumps(own))
    began = reminded = time.monotonic()
    while missing := [str(rank) for rank, key in enumerate(keys) if not store.check([key])]:
        now, ranks = time.monotonic(), f"rank {', '.join(missing)}"
        if now - began > LAUNCHED_TIMEOUT_S:
            raise RanksDiffer(
                f"{ranks} did not say in {now - began:.0f} s which overlay it runs, and this engine must not answer:\n"
                "  it hangs, or runs without the overlay or with process_proof = false; set the same PYTHONPATH, "
                "OVERLAY_ variables and patches.toml for every rank"
            )
        if now - reminded > LAUNCHED_REMINDER_S:
            reminded = now
            ctx.log.warning("%s has not said which overlay it runs: it still loads the model, or runs without", ranks)
        time.sleep(0.1)
    return [json.loads(store.get(key)) for key in keys]


def prove(module: ModuleType, ctx: Context) -> None:
    def ask_first(wrapped: Callable, core: Any, args: tuple, kwargs: dict) -> object:
        overlay = startup.current()
        own, strict = describe(overlay), overlay.config.strict
        if launched_from_outside(core.model_executor):
            answers, who = meet(ctx, own), "rank 0"
            own = answers[0]  # so that all ranks find the same
        else:
            answers, who = ask(core.model_executor.collective_rpc), "the engine core"
        problems = compare(answers, own, ctx.hardware.capability is not None, strict)
        if problems:
            raise RanksDiffer(
                "this engine's processes do not run the same overlay, and it must not answer:\n  "
                + "\n  ".join(problems)
                + f"\n  {who} (pid {own['pid']}) has fingerprint {own['fingerprint']}; "
                "set the same PYTHONPATH, OVERLAY_ variables and patches.toml for every process on every node"
            )
        for process, name, why in astray(answers, own, strict=True):  # none where strict: refused
            ctx.log.error("strict = false: %s serves without %s: %s", process, name, why)
        ctx.log.info("%d of %d workers run overlay %s", len(answers), len(answers), answers[0]["fingerprint"])
        return wrapped(*args, **kwargs)

    ctx.wrap(module, TARGET, ask_first)


def mark_hash(module: ModuleType, ctx: Context) -> None:
    """Data parallel ranks are engine cores of their own. vLLM compares this hash when one of them reports ready, and
    prints both where they differ: what is added says that it was the overlay."""

    @cache
    def of_this_process() -> str:
        mark = f"with overlay {software(startup.current().entries)}"
        ctx.log.info("data parallel: this process runs %s; vLLM refuses a rank whose hash says another", mark)
        return mark

    def compute(wrapped: Callable, config: Any, args: tuple, kwargs: dict) -> str:
        stock = wrapped(*args, **kwargs)
        return f"{stock} {of_this_process()}" if config.data_parallel_size > 1 else stock

    ctx.wrap(module, "ParallelConfig.compute_hash", compute)


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
        "engine reports ready. Each worker is asked through Executor.collective_rpc for its fingerprint, and for "
        "patches that failed or were bypassed, by a function that travels by value; ranks of an external launcher tell "
        "each other through torch's store. A difference stops the engine, naming the rank and what differs. Data "
        "parallel ranks are engines of their own: the software's fingerprint is part of ParallelConfig.compute_hash, "
        "which vLLM compares when they report ready."
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
        Target(*LAUNCHED),
        Target("vllm.distributed.parallel_state", "get_world_group", ("()",)),
        Target(PARALLEL, "ParallelConfig.compute_hash", ("(self)",)),
    ),
    probe=probe,
    apply={CORE: prove, PARALLEL: mark_hash},
)
