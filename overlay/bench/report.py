"""The run as a table, as JSON and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from overlay.bench.bars import Bar, Row
from overlay.errors import OverlayError
from overlay.measurement import provenance
from overlay.table import table


def document(rows: Sequence[Row], bars: Sequence[Bar], complete: bool) -> dict[str, object]:
    """The run in the shape of `bench --json`, with what is needed to place it."""
    return {**provenance(), "complete": complete, "rows": list(rows), "bars": [bar.as_json() for bar in bars]}


def text(rows: Sequence[Row], bars: Sequence[Bar]) -> str:
    """The table of all cases, a line for each, and the bars that were missed."""
    ours = [row for row in rows if row["kernel"] == "ours"]
    names = [name for name in dict.fromkeys(row["kernel"] for row in rows) if name != "ours"]
    by_case = {(row["kernel"], *_shape(row)): row["us"] for row in rows}
    headers = ("H", "T", "K", "KV", "indices", "us", "cold us", "TFLOP/s", "GB/s", "% of limit", *names)
    cells = []
    for row in ours:
        peers = (by_case.get((name, *_shape(row))) for name in names)
        cells.append(
            (
                row["heads"], row["tokens"], f"{row['columns']}/{row['valid']}", row["kv_dtype"], row["pattern"],
                f"{row['us']:.1f}", _number(row["cold_us"]), f"{row['tflops']:.0f}", f"{row['gbps']:.0f}",
                f"{row['percent_of_limit']:.0f}", *(f"{us / row['us']:.2f}x" if us else "-" for us in peers),
            )
        )  # fmt: skip
    missed = [bar for bar in bars if not bar.met]
    lines = [table(headers, cells), "", f"{len(bars) - len(missed)} of {len(bars)} bars met"]
    lines += [f"missed: {bar.name}: {describe(bar)}" for bar in missed]
    return "\n".join(lines)


def describe(bar: Bar) -> str:
    value = "not measured" if bar.value is None else f"{bar.value:.3g}"
    return f"{value} ({'at least' if bar.at_least else 'at most'} {bar.limit:.3g})"


def _shape(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in ("heads", "tokens", "columns", "valid", "kv_dtype", "pattern"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def figure_class() -> type:
    """matplotlib's. Raises OverlayError where there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OverlayError("--plot needs matplotlib: pip install matplotlib") from error
    return Figure


def plot(rows: Sequence[Row], file: Path) -> None:
    """Time and percent of the limit over T, one column of panels for each head count, bf16 and fp8 and the peers."""
    full = [row for row in rows if row["pattern"] == "uniform" and row["columns"] == row["valid"] and row["us"]]
    heads = sorted({row["heads"] for row in full})
    figure = figure_class()(figsize=(4 * len(heads), 7), layout="constrained")
    axes = figure.subplots(2, len(heads), sharex=True, sharey="row", squeeze=False)
    for column, head_count in enumerate(heads):
        upper, lower = axes[0][column], axes[1][column]
        upper.set(title=f"{head_count} heads", xscale="log", yscale="log")
        lower.set(xlabel="tokens", ylim=(0, 105))
        for kernel, dtype in dict.fromkeys((row["kernel"], row["kv_dtype"]) for row in full):
            line = [
                row for row in full if (row["kernel"], row["kv_dtype"], row["heads"]) == (kernel, dtype, head_count)
            ]
            tokens = [row["tokens"] for row in line]
            style = "-o" if kernel == "ours" else "--"
            upper.plot(tokens, [row["us"] for row in line], style, label=f"{kernel} {dtype}", markersize=3)
            if kernel == "ours":
                lower.plot(tokens, [row["percent_of_limit"] for row in line], style, label=dtype, markersize=3)
    axes[0][0].set_ylabel("microseconds a call")
    axes[1][0].set_ylabel("% of the limit (gather or mma.sync)")
    axes[0][-1].legend(fontsize=7)
    axes[1][-1].legend(fontsize=7)
    figure.savefig(file)
