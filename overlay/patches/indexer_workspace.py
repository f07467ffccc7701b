"""indexer_workspace: on GB10 the sparse indexer scores a long prefill in chunks that the machine survives."""

import os
from types import ModuleType

from overlay.context import Context
from overlay.declare import Option, Patch, Target, Verdict, absent, present

ENVS = "vllm.envs"
NAME = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"


def probe(ctx: Context) -> Verdict:
    if f'os.getenv("{NAME}", "512")' not in ctx.sources.text(ENVS):
        return absent(f"{NAME} has another default than 512 in this vLLM")
    if ctx.hardware.capability is not None and not ctx.hardware.integrated:
        return absent(f"{ctx.hardware.name} has memory of its own")
    return present("the indexer's scores of a long prefill come in ever new sizes of up to 512 MiB")


def lower_default(module: ModuleType, ctx: Context) -> None:
    """vLLM reads its variables through this table; the process's environment stays as it is."""
    table, stock = module.environment_variables, module.environment_variables[NAME]
    table[NAME] = lambda: stock() if NAME in os.environ else ctx.options["max_logits_mb"]
    ctx.undo.append(lambda: table.__setitem__(NAME, stock))


PATCH = Patch(
    id="indexer_workspace",
    title="the indexer's scores of a long prefill exhaust GB10's memory",
    why=(
        "Every chunk of a long prefill allocates [queries, pools] fp32 scores of a size that was never seen before, up "
        "to 512 MiB. The caching allocator keeps a segment for each. On unified memory the driver runs dry before "
        "torch can release them: a prefill of 230K tokens kills the engine (NV_ERR_NO_MEMORY)."
    ),
    how="Where VLLM_SPARSE_INDEXER_MAX_LOGITS_MB is not set, its default on integrated GPUs is 64 instead of 512.",
    upstream=("vllm-project/vllm#55569", "vllm-project/vllm#55572", "vllm-project/vllm#58068"),
    until="the scores have a fixed width (#58068) or another default on integrated GPUs",
    targets=(Target(ENVS, "environment_variables"),),
    options=(
        Option(
            "max_logits_mb",
            int,
            64,
            "MiB of scores at a time on integrated GPUs, where vLLM's default is 512",
            limits=(1, 65536),
        ),
    ),
    probe=probe,
    apply={ENVS: lower_default},
)
