"""Plain text tables, and lines wrapped to a terminal's width."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows under headers, columns as wide as their longest cell; the last column wraps to the terminal."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    before_last = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = max(shutil.get_terminal_size((120, 24)).columns - before_last, 30)
    widths[-1] = min(widths[-1], room)
    lines = [_line(list(headers), widths), "  ".join("-" * width for width in widths)]
    for row in cells:
        wrapped = textwrap.wrap(row[-1], room) or [""]
        lines.append(_line([*row[:-1], wrapped[0]], widths))
        lines += [" " * before_last + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
