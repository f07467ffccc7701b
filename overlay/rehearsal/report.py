"""Two rehearsed columns as text and as findings: pure functions of what `columns.ask` returned."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlay.checkpoint.findings import Finding, error, info, warning
from overlay.table import table

GIB = 1024**3
WIDTH = 120
Column = Mapping[str, Any]


def as_json(columns: Mapping[str, Column], findings: Sequence[Finding]) -> dict[str, Any]:
    """The shape of `rehearse --json`: both columns, and what to know about them."""
    return {**columns, "findings": [finding.as_json() for finding in findings]}


def as_text(columns: Mapping[str, Column], findings: Sequence[Finding]) -> str:
    """The columns side by side, why each backend was chosen or refused, the memory sum, the patches, the findings."""
    parts = [side_by_side(columns), reasons(columns), patches(columns["overlay"]), told(findings)]
    return "\n\n".join(filter(None, parts))


def side_by_side(columns: Mapping[str, Column]) -> str:
    """One line for each fact that at least one column has."""
    rows = [(label, *(_cell(show, column) for column in columns.values())) for label, show in ROWS]
    return table(("", *columns), [row for row in rows if any(cell != "-" for cell in row[1:])])


def reasons(columns: Mapping[str, Column]) -> str:
    """For each column what the selector and the overlay said, then the memory sum where one was made."""
    parts = [why(name, column) for name, column in columns.items()]
    parts += [memory(name, column) for name, column in columns.items() if column.get("budget")]
    return "\n\n".join(parts)


def patches(overlay: Column) -> str:
    """The patches of the overlay's process; empty where it ended before it had any."""
    rows = [(patch["id"], patch["state"], patch["reason"]) for patch in overlay["patches"]]
    return table(("patch", "state", "reason"), rows) if rows else ""


def told(findings: Sequence[Finding]) -> str:
    """Each finding with its consequence and its cure."""
    return "\n".join(
        textwrap.fill(f"{f.severity}: {f.what}", WIDTH, subsequent_indent="  ")
        + f"\n  so: {f.consequence}\n  cure: {f.cure}"
        for f in findings
    )


def _cell(show: Callable[[Column], object], column: Column) -> str:
    try:
        value = show(column)
    except KeyError:  # the column ended before this was known
        return "-"
    return "-" if value is None else str(value)


def _graphs(column: Column) -> str:
    kind = "breakable" if column["breakable_cudagraph"] else "compiled"
    return f"{column['cudagraph_mode']} ({kind})" if column["cudagraph_mode"] != "NONE" else "NONE"


def _kv_dtype(column: Column) -> str:
    asked, used = column["kv_cache_dtype_asked"], column["kv_cache_dtype"]
    return used if used == asked else f"{used} (asked: {asked})"


ROWS: tuple[tuple[str, Callable[[Column], object]], ...] = (
    ("boots, as far as a rehearsal sees", lambda c: "yes" if c["boots"] else f"NO, at {c['failure']['stage']}"),
    ("vllm", lambda c: c["vllm"]),
    ("architecture", lambda c: c["architecture"]),
    ("attention backend", lambda c: c["attention_backend"]),
    ("KV cache dtype", _kv_dtype),
    ("bytes per token and layer", lambda c: c["row_bytes"]),
    ("block size, tokens", lambda c: f"{c['block_size']:,}"),
    ("bytes per block, all layers", lambda c: f"{c['bytes_per_block']:,}"),
    ("bytes per token, all layers", lambda c: f"{c['bytes_per_token']:,}"),
    ("KV cache memory per GPU", lambda c: f"{c['kv_memory'] / GIB:.2f} GiB"),
    ("tokens that fit", lambda c: f"{c['kv_tokens']:,}"),
    ("requests of full length at once", lambda c: f"{c['max_concurrency']:,.2f} of {c['max_model_len']:,} tokens"),
    ("weights per GPU, as vLLM builds them", lambda c: f"{c['weight_bytes'] / GIB:.2f} GiB"),
    ("other buffers per GPU", lambda c: f"{c['buffer_bytes'] / GIB:.2f} GiB"),
    ("quantisation", lambda c: c["quantization"] or "none"),
    ("MoE backend", lambda c: c["moe_backend"]),
    ("MoE quantisation", lambda c: c["moe_quantization"]),
    ("CUDA graphs", _graphs),
    ("indexer top-k", lambda c: c["indexer_topk"]),
)


def why(name: str, column: Column) -> str:
    """The reasons of one column: the selector's refusals, what the overlay said, and what stopped it."""
    lines = []
    for selection in column.get("selections", ()):
        asked = f"head size {selection['head_size']}, KV {selection['kv_cache_dtype']}"
        lines.append(f"  {asked}: {selection['chosen'] or 'no backend'}")
        lines += [f"    {backend} refused: {'; '.join(r)}" for backend, r in selection["refused"].items()]
    lines += [f"  {line}" for line in column["log"]]
    if column["failure"]:
        said = column["failure"]["error"]
        if any(selection["refused"] for selection in column.get("selections", ())):
            said = said.partition(" Reasons: {")[0]  # vLLM's message repeats the refusals, which stand above
        lines.append(f"  would not boot: {said}")
    wrapped = [textwrap.fill(line, WIDTH, subsequent_indent="      ") for line in lines]
    return "\n".join([f"{name}: why", *(wrapped or ["  nothing to explain"])])


def memory(name: str, column: Column) -> str:
    """The subtraction that leaves the KV cache, one term after the other."""
    budget = column["budget"]
    terms = (
        ("weights", budget["weights"]),
        ("buffers of the built model", budget["buffers"]),
        ("dense prefill in the profile run", budget["prefill_workspace"]),
        ("allowance for activations, graphs, CUDA, NCCL", budget["allowance"]),
    )
    start = f"{name}: {budget['memory'] / GIB:.2f} GiB x gpu_memory_utilization {budget['utilization']:g}"
    subtracted = "".join(f" - {size / GIB:.2f} ({what})" for what, size in terms if size)
    return textwrap.fill(
        f"{start}{subtracted} = {budget['kv_cache'] / GIB:.2f} GiB for the KV cache", WIDTH, subsequent_indent="  "
    )


def findings(stock: Column, overlay: Column) -> list[Finding]:
    """What the two columns alone tell; the checkpoint's own faults are the audit's."""
    found = []
    if not overlay["boots"]:
        found.append(_no_boot(stock, overlay))
    elif not stock["boots"]:
        at, said = _failure(stock)
        found.append(
            warning("stock_boot", f"stock vLLM would not boot, at {at}: {said}", "no server", "run with the overlay")
        )
    if stock.get("kv_cache_dtype") == "fp8_ds_mla" and stock["kv_cache_dtype_asked"] != "fp8_ds_mla":
        cure = "with the overlay, --kv-cache-dtype bfloat16 (exact rows) or fp8 (rows of 512 bytes)"
        found.append(
            warning(
                "kv_cache_rewritten",
                f"stock vLLM silently stores fp8_ds_mla rows where {stock['kv_cache_dtype_asked']} was asked for",
                f"{stock['row_bytes']} bytes a token and layer, block-scaled fp8",
                cure if stock["rope_free"] else "none: the overlay's backend serves models without rope only",
            )
        )
    if (stages := overlay.get("pipeline_parallel_size", 1)) > 1:
        found.append(
            info(
                "pipeline_stage",
                f"the figures are those of the first of {stages} pipeline stages",
                "another stage may hold more layers with a KV cache and then decides how many tokens fit",
                "none needed",
            )
        )
    return found + _capacity(stock, overlay)


def _failure(column: Column) -> tuple[str, str]:
    """Where a column ended, and the beginning of what vLLM said; the whole of it is in the column."""
    return column["failure"]["stage"], textwrap.shorten(column["failure"]["error"], 200, placeholder=" ...")


def _no_boot(stock: Column, overlay: Column) -> Finding:
    at, said = _failure(overlay)
    cure = "see the message; `python -m overlay status` shows the patches"
    if stock["failure"] == overlay["failure"]:
        cure = "what the message names: vLLM without the overlay says the same"
    if overlay.get("budget", {}).get("kv_cache", 1) <= 0:
        cure = "more GPUs (--tp), a smaller or quantised checkpoint, or a higher --gpu-memory-utilization"
    return error("overlay_boot", f"vLLM with the overlay would not boot, at {at}: {said}", "no server", cure)


def stored(size: int, overlay: Column) -> list[Finding]:
    """What the shards hold (`size` bytes by their headers) against what vLLM builds on a rank, where that is known."""
    if "weight_bytes" not in overlay:
        return []
    ranks = overlay["tensor_parallel_size"] * overlay["pipeline_parallel_size"]
    return [
        info(
            "weights",
            f"the shards hold {size / GIB:.2f} GiB by their headers; vLLM builds weights of "
            f"{overlay['weight_bytes'] / GIB:.2f} GiB on {'the rank' if ranks == 1 else f'each of {ranks} ranks'}",
            "more in sum is what every rank keeps whole; less is what is left out (a draft layer, a vision tower)",
            "none needed",
        )
    ]


def _capacity(stock: Column, overlay: Column) -> list[Finding]:
    """How many more tokens the overlay's column holds, where both are known and differ."""
    ours, theirs = overlay.get("kv_tokens"), stock.get("kv_tokens")
    if not ours or not theirs or ours == theirs:
        return []
    more = f"{ours:,} tokens fit with the overlay, {theirs:,} without ({ours / theirs - 1:+.0%})"
    cause = f"{overlay['bytes_per_block']:,} against {stock['bytes_per_block']:,} bytes a block"
    if overlay["kv_memory"] != stock["kv_memory"]:
        cause += f", in {overlay['kv_memory'] / GIB:.2f} against {stock['kv_memory'] / GIB:.2f} GiB"
    return [info("kv_capacity", more, cause, "none needed")]
