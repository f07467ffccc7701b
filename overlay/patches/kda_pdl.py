"""kda_pdl: programmatic dependent launch off on capability 12.x, for those who suspect it."""

from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present

CUDA = "vllm.platforms.cuda"
ASKED = "CudaPlatformBase.is_arch_support_pdl"


def probe(ctx: Context) -> Verdict:
    if ctx.hardware.lacks(12):
        return absent(f"{ctx.hardware.architecture} is not of the 12.x family")
    if "major >= 9" not in ctx.sources.source_of(CUDA, ASKED):
        return absent("this vLLM does not enable PDL for every capability from 9.0")
    return present("PDL is enabled on 12.x, where vLLM never validated it")


def off_on_12(module: ModuleType, ctx: Context) -> None:
    """The platform's module comes before every module that asks, the one that asks only at import included."""

    def supported(wrapped: Any, platform: Any, args: tuple, kwargs: dict) -> bool:
        capability = platform.get_device_capability()
        return (capability is None or capability.major != 12) and wrapped(*args, **kwargs)

    ctx.wrap(module, ASKED, supported)


PATCH = Patch(
    id="kda_pdl",
    title="programmatic dependent launch is on for 12.x without having been validated there",
    why=(
        "vLLM enables PDL for every capability from 9.0. The recurrent-state kernels of linear attention, the causal "
        "convolution, gated norms, state gather and scatter, DeepGEMM and others use it. Nobody validated it on 12.x; "
        "an early port switched it off as a precaution. No failing case was ever published."
    ),
    how="The platform says no on 12.x: one answer for all kernels of all models, which may cost speed. Off by default.",
    upstream=(),
    until="somebody publishes a failing case, or a validation",
    targets=(Target(CUDA, ASKED, ("(cls)",)),),
    probe=probe,
    apply={CUDA: off_on_12},
    default=False,
)
