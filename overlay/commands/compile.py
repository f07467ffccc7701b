"""Every kernel variant compiled here, without a GPU, and what each needs of a multiprocessor."""

import argparse
import json

from overlay.table import table

HELP = "compile every kernel variant (no GPU needed); exit 1 where one spills or exceeds the shared memory of sm_12x"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", default="sm_120,sm_121", metavar="LIST", help="architectures, comma separated (sm_120,sm_121)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the table; 1 where a variant is over budget."""
    from overlay.kernel import build, report

    nvrtc = build.nvrtc_version()
    archs = [arch.strip() for arch in options.arch.split(",")]
    variants = [row for arch in archs for row in report.compile_variants(arch)]
    helpers = [row for arch in archs for row in report.compile_helpers(arch)]
    over = [row for row in variants + helpers if report.over_budget(row)]
    if options.json:
        print(json.dumps({"nvrtc": nvrtc, "variants": variants, "helpers": helpers}, indent=2))
        return 1 if over else 0
    headers = ("kernel", "arch", "heads", "KV", "registers", "spill", "shared", "verdict")
    cells = [
        (
            *(row["kernel"], row["arch"], row.get("heads", "any"), row.get("kv_dtype", "any")),
            *(row["registers"], row["spill_bytes"], row["shared_bytes"], report.over_budget(row) or "fits"),
        )
        for row in variants + helpers
    ]
    print(f"NVRTC {nvrtc}; shared memory and spills in bytes\n")
    print(table(headers, cells))
    if over:
        print(f"\n{len(over)} of {len(cells)} over budget")
    return 1 if over else 0
