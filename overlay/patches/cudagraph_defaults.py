"""cudagraph_defaults: on GB10 the rope-free models capture decode graphs only, unless the user asked for something."""

import os
from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present
from overlay.hardware import Hardware

CONFIG = "vllm.config.vllm"
SEAM = "VllmConfig._maybe_enable_breakable_cudagraph"
ENV = "VLLM_USE_BREAKABLE_CUDAGRAPH"
ARCHITECTURES = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")


def probe(ctx: Context) -> Verdict:
    if ARCHITECTURES[0] not in ctx.sources.text(CONFIG):
        return absent("this vLLM does not turn breakable CUDA graphs on for rope-free sparse-MLA models")
    if ctx.hardware.capability is not None and not ctx.hardware.integrated:
        return absent(f"{ctx.hardware.name} has memory of its own: graphs do not compete with the host for it")
    return present("breakable CUDA graphs are on by default for rope-free sparse-MLA models")


def here(ctx: Context) -> bool:
    """A visible GPU shares the host's memory; with enabled = true always.

    Asked when a configuration is made: a front end without a GPU arms this patch and must not decide for workers whose
    GPUs have memory of their own. NVML answers, because asking vLLM's platform would initialise CUDA before the fork.
    """
    return ctx.wanted is True or Hardware().integrated


def decode_graphs_only(module: ModuleType, ctx: Context) -> None:
    from vllm.config.compilation import CUDAGraphMode

    asked = ENV in os.environ  # by the user: vLLM sets it itself once a configuration has been made

    def enable(wrapped: Any, config: Any, args: tuple, kwargs: dict) -> bool:
        compilation = config.compilation_config
        model = config.model_config
        # From -O2 on the default is FULL_AND_PIECEWISE; None says that neither -cc nor --enforce-eager decided.
        concerned = (
            not asked
            and compilation.cudagraph_mode is None
            and config.optimization_level >= 2
            and model is not None
            and set(model.architectures) & set(ARCHITECTURES)
        )
        if concerned and not here(ctx) and not Hardware().devices:
            ctx.log.warning(
                "no GPU is visible where the engine is configured: CUDA graphs are left as vLLM has them; on GB10, "
                "which loses most of its KV cache to them, set [patches.cudagraph_defaults] enabled = true"
            )
        if concerned and here(ctx):
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            ctx.log.info(
                "CUDA graphs: decode batches only, so that the KV cache keeps the memory of piecewise graphs; "
                "-cc.cudagraph_mode=FULL_AND_PIECEWISE brings vLLM's default back"
            )
        return wrapped(*args, **kwargs)

    ctx.wrap(module, SEAM, enable)


PATCH = Patch(
    id="cudagraph_defaults",
    title="breakable CUDA graphs take the KV cache's memory on GB10",
    why=(
        "vLLM turns breakable CUDA graphs on for GLM-5.3-Flash: every mixed batch size is captured in pieces, measured "
        "in full and subtracted from the KV cache. On GB10 this cut the cache by a factor of 4.6 and gave no speed "
        "(24.4 tokens/s without them, 23.7 with): the memory bandwidth is the limit there."
    ),
    how=(
        "On integrated GPUs the default graph mode of these models is FULL_DECODE_ONLY, on every release: decode "
        "batches replay whole graphs, prefill and mixed batches run eagerly, nothing is captured in pieces. Only where "
        "the user gave no graph mode, no --enforce-eager, no -O0 or -O1 and no VLLM_USE_BREAKABLE_CUDAGRAPH. The "
        "remedy that was passed around, VLLM_USE_BREAKABLE_CUDAGRAPH=0, ends in the same graph mode in 0.30 to 0.33, "
        "but vLLM then plans for a compiled model, which this one is not, and runs every custom operator as plain "
        "torch code. The estimate of graph memory stays on: without it GB10's driver runs out of pages later."
    ),
    upstream=(),
    until="breakable graphs cost no KV cache on integrated GPUs",
    targets=(Target(CONFIG, SEAM, ("(self)",)),),
    probe=probe,
    apply={CONFIG: decode_graphs_only},
)
