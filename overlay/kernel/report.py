"""Resources of all kernels for an architecture, against the budget of sm_120 and sm_121."""

from overlay.kernel.build import Program, attention_program, build, index_rows_program, merge_program
from overlay.kernel.variants import SHARED_LIMIT, VARIANTS


def compile_variants(arch: str) -> list[dict[str, object]]:
    """Compile every variant of the main kernel; a dict each, of `compile_helpers` plus heads and kv_dtype."""
    return [
        {**_compile(attention_program(variant), arch), "heads": variant.heads, "kv_dtype": variant.kv_dtype}
        for variant in VARIANTS
    ]


def compile_helpers(arch: str) -> list[dict[str, object]]:
    """The kernels that serve every variant: kernel, arch, registers, spill_bytes, shared_bytes (static and dynamic)."""
    return [_compile(program, arch) for program in (merge_program(), index_rows_program())]


def _compile(program: Program, arch: str) -> dict[str, object]:
    resources = build(program, arch).resources
    return {
        "kernel": program.name,
        "arch": arch,
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "shared_bytes": resources.static_shared_bytes + program.dynamic_shared_bytes,
    }


def over_budget(row: dict[str, object]) -> str:
    """Why a row is over budget, or an empty string. Spills count on sm_12x, which the kernel is for."""
    reasons = []
    if row["spill_bytes"] and row["arch"].startswith("sm_12"):
        reasons.append("spills")
    if row["shared_bytes"] > SHARED_LIMIT:
        reasons.append(f"more than {SHARED_LIMIT} bytes of shared memory")
    return ", ".join(reasons)
