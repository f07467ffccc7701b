"""What each probe's rows say: their tables, and whether they prove anything."""

from collections.abc import Callable
from dataclasses import dataclass

from overlay.table import table

Rows = list[dict]


@dataclass(frozen=True)
class Part:
    """One probe: `overlay.probe.<name>` measures, this tells. `proves`: does it say anything if no row is wrong?"""

    help: str
    subject: str
    headers: tuple[str, ...]
    lines: Callable[[Rows], list[tuple]]
    absent: Callable[[dict], str]
    proves: Callable[[Rows], bool]
    without_gpu: str


def is_wrong(row: dict) -> bool:
    """A row of a backend that vLLM would use unasked, or that is held to it, and that failed."""
    return row["ok"] is False and row.get("required", True)


def verdict(part: Part, rows: Rows) -> bool:
    return part.proves(rows) and not any(is_wrong(row) for row in rows)


def as_text(part: Part, rows: Rows, has_gpu: bool) -> str:
    """The measurements as a table, and what is not to be had with the reasons."""
    there = [row for row in rows if row["ok"] is not None]
    missing = [f"  {part.absent(row)}: {row['reason']}" for row in rows if row["ok"] is None]
    sections = [
        "" if has_gpu else f"No GPU here: {part.without_gpu}",
        table(part.headers, part.lines(there)) if there else "",
        "\n".join(["not to be had here:" if has_gpu else "what vLLM would say:", *missing]) if missing else "",
    ]
    return "\n\n".join(filter(None, sections))


def mark(row: dict) -> str:
    if row["ok"]:
        return "ok"
    return f"{'WRONG' if is_wrong(row) else 'differs'} {row['reason']}".rstrip()


def numbers(row: dict) -> tuple[str, str]:
    if row["cosine"] is None:
        return "", ""
    return f"{row['cosine']:.5f}", f"{row['magnitude']:.4g}"


def moe_lines(rows: Rows) -> list[tuple]:
    return [
        (row["checkpoint"], row["flag"], row["backend"] or "-", row["quantity"], *numbers(row), mark(row))
        for row in rows
    ]


def attention_lines(rows: Rows) -> list[tuple]:
    """One line for all batch sizes of a backend, dtype and kind of index rows; one for each that is not right."""
    groups: dict[tuple, Rows] = {}
    for row in rows:
        key = (row["backend"], row["kv_cache_dtype"], row["index_rows"] or "-")
        groups.setdefault(key, []).append(row)
    lines = []
    for key, group in sorted(groups.items()):
        good = [row for row in group if row["ok"]]
        if good:
            measured = [row for row in good if row["cosine"] is not None] or good
            worst = min(measured, key=lambda row: row["cosine"] or 0.0)
            farthest = max(measured, key=lambda row: abs((row["magnitude"] or 1.0) - 1))
            sizes = [row["tokens"] for row in good]
            shown = numbers({**worst, "magnitude": farthest["magnitude"]})
            lines.append((*key, f"{len(sizes)} of {min(sizes)} to {max(sizes)}", *shown, "ok"))
        lines += [(*key, row["tokens"] or "-", *numbers(row), mark(row)) for row in group if not row["ok"]]
    return lines


def indexer_lines(rows: Rows) -> list[tuple]:
    return [
        (row["step"], row["kernel"], row["case"], row["rows"], "-" if row["wrong"] is None else row["wrong"], mark(row))
        for row in rows
    ]


def measured(rows: Rows) -> bool:
    """Something was, by what engines use unasked: without a GPU, nothing was."""
    return any(row["ok"] and row["required"] for row in rows)


PARTS = {
    "moe": Part(
        help="NVFP4 experts: every backend that this GPU can run",
        subject="the experts",
        headers=("checkpoint", "--moe-backend", "backend", "quantity", "cosine", "magnitude", ""),
        lines=moe_lines,
        absent=lambda row: f"{row['flag']} ({row['checkpoint']})",
        # Marlin and emulation are there on every GPU, and without one.
        proves=lambda rows: {"MARLIN", "EMULATION"} <= {row["backend"] for row in rows if row["ok"]},
        without_gpu="the layers were built for capability 12.1 and no kernel ran.",
    ),
    "attention": Part(
        help="sparse MLA: every backend that the engine could choose on this GPU, batches of 1 to 4096 tokens",
        subject="the attention backends",
        headers=("backend", "KV cache", "index rows", "batch", "worst cosine", "magnitude", ""),
        lines=attention_lines,
        absent=lambda row: f"{row['backend']} ({row['kv_cache_dtype']})",
        proves=measured,
        without_gpu="no kernel ran, so nothing is proven. This is what vLLM would choose from on capability 12.1.",
    ),
    "indexer": Part(
        help="the indexer's top-k: crowded bins, NaN and short rows, by every kernel that this GPU can run",
        subject="the indexer's top-k",
        headers=("step", "kernel", "case", "rows", "wrong", ""),
        lines=indexer_lines,
        absent=lambda row: f"{row['step']}, {row['kernel']}",
        proves=measured,
        without_gpu="only vLLM's plain torch variant ran, so nothing is proven of a kernel.",
    ),
}
