"""All checks in order, and the report in words."""

from collections.abc import Sequence

from overlay.doctor import boot, cuda, installed, interpreter, machine
from overlay.doctor.checks import Check, Result
from overlay.table import table

CHECKS = (
    Check("sitecustomize", True, interpreter.in_effect),
    Check("chained", False, interpreter.chained),
    Check("one_overlay", True, interpreter.one_overlay),
    Check("pythonpath", True, interpreter.pythonpath),
    Check("child", True, interpreter.child),
    Check("flags", True, interpreter.flags),
    Check("config", True, installed.configuration),
    Check("vllm", True, installed.vllm),
    Check("patches", True, installed.patches),
    Check("versions", True, installed.versions),
    Check("cupy", True, installed.cupy),
    Check("pins", False, installed.pins),
    Check("gpu", True, cuda.gpu),
    Check("nvrtc", True, cuda.nvrtc),
    Check("libraries", True, cuda.libraries),
    Check("nccl", False, cuda.nccl),
    Check("kernel_cache", True, machine.kernel_cache),
    Check("autotune_cache", False, machine.autotune_cache),
    Check("memory", False, machine.memory),
    Check("running", False, machine.running),
    Check("boot", False, boot.boot),
)


def as_text(results: Sequence[Result], fingerprint: dict[str, str]) -> str:
    rows = [
        (result.name, result.status, f"{result.what}. Fix: {result.fix}" if result.fix else result.what)
        for result in results
    ]
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "warn", "fail")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    if fingerprint:
        summary += "\nfingerprint: " + ", ".join(f"{name} {digest}" for name, digest in fingerprint.items())
    return f"{table(('check', 'status', 'found'), rows)}\n\n{summary}"
