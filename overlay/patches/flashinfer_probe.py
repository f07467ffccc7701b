"""flashinfer_probe: when FlashInfer's sparse MLA cannot be used, the log says why."""

import importlib
from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present

FLASHINFER = "vllm.utils.flashinfer"
ASKED = "has_flashinfer_sparse_mla_sm120"
# What vLLM imports to answer the question.
NEEDED = (
    ("flashinfer.autotuner", "autotune"),
    ("flashinfer.decode", "trtllm_batch_decode_sparse_mla_dsv4"),
    ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache_mla"),
)


def probe(ctx: Context) -> Verdict:
    if "except ImportError:\n        return False" not in ctx.sources.source_of(FLASHINFER, ASKED):
        return absent("this vLLM does not swallow the ImportError")
    return present("an ImportError of FlashInfer is swallowed and answered as `not available`")


def reason(module: ModuleType) -> str:
    """Why the answer is no, found by doing again what vLLM did."""
    if not module.has_flashinfer():
        return "FlashInfer is not installed, or has neither precompiled kernels nor nvcc and ninja to compile its own"
    for name, attribute in NEEDED:
        try:
            if not callable(getattr(importlib.import_module(name), attribute)):
                return f"{name}.{attribute} is not callable"
        except (ImportError, AttributeError) as error:
            cause = f", caused by {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
            return f"importing {attribute} from {name}: {type(error).__name__}: {error}{cause}"
    return "FlashInfer can be imported now: an earlier import of it must have failed"


def say_why(module: ModuleType, ctx: Context) -> None:
    said = []

    def has(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> bool:
        available = wrapped(*args, **kwargs)
        if not available and not said:
            said.append(True)
            ctx.log.warning("FlashInfer's sparse MLA for 12.x cannot be used: %s", reason(module))
        return available

    ctx.wrap(module, ASKED, has)


PATCH = Patch(
    id="flashinfer_probe",
    title="why FlashInfer's sparse MLA is unavailable is not told",
    why=(
        "vLLM asks whether FlashInfer has the sparse-MLA kernels of 12.x by importing them, and takes any ImportError "
        "for a no: a broken dependency ends in `requires FlashInfer's sparse MLA decode API` on a machine where it is "
        "installed."
    ),
    how="When the answer is no, the import is done again and its own exception is logged, once a process.",
    upstream=("vllm-project/vllm#57932",),
    until="vLLM logs the exception",
    targets=(Target(FLASHINFER, ASKED, ("()",)), Target(FLASHINFER, "has_flashinfer", ("()",))),
    probe=probe,
    apply={FLASHINFER: say_why},
)
