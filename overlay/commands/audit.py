"""What is wrong with a checkpoint, before anybody loads it."""

import argparse
import json
from pathlib import Path

from overlay.checkpoint.audit import Audit, audit
from overlay.table import table

HELP = "what is wrong with a checkpoint, from its headers and scales: no GPU, nothing loaded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a folder with config.json and *.safetensors")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print the audit; 1 where a stock vLLM would refuse, crash or compute wrong numbers."""
    result = audit(options.folder)
    print(json.dumps(result.as_json(), indent=2) if options.json else as_text(result))
    return 1 if result.failed else 0


def as_text(result: Audit) -> str:
    config = result.config
    said = f"{config.method or 'no known method'}, {result.statement.label}, in {config.file}" if config else "none"
    blocks = [
        f"{result.architecture} in {result.path}\n"
        f"quantisation: {said}; KV cache: {(config and config.kv_cache) or 'nothing said'}"
    ]
    if result.totals:
        rows = [
            (row.kind, f"{row.parameters:,}", size(row.bytes), ", ".join(formats(row.formats))) for row in result.totals
        ]
        parameters = sum(row.parameters for row in result.totals)
        rows.append(("total", f"{parameters:,}", size(result.bytes), ""))
        blocks.append(table(("part", "parameters", "size", "stored as"), rows))
    if result.activations:
        rows = [
            (row.kind, row.claimed, f"{row.usable} of {row.projections}", row.summary) for row in result.activations
        ]
        headers = ("NVFP4 part", "vLLM takes it for", "usable activation scales", "to be served as")
        blocks.append(table(headers, rows))
    if result.findings:
        rows = [
            (row.severity, f"{row.what}. This causes: {row.consequence}. Cure: {row.cure}. [{row.check}]")
            for row in result.findings
        ]
        blocks.append(table(("finding", ""), rows))
    else:
        blocks.append("nothing found")
    return "\n\n".join(blocks)


def formats(by_format: dict[str, int]) -> list[str]:
    """Storage formats, the one with most parameters first."""
    return [name.upper() for name, _ in sorted(by_format.items(), key=lambda item: -item[1])]


def size(count: int) -> str:
    """Bytes as GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
