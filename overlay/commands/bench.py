"""The kernel measured against the limits of this GPU and against its peers."""

import argparse
import json
import sys
import time
from pathlib import Path

from overlay.errors import OverlayError

KEEP_SECONDS = 10.0  # a run that is killed loses no more of its minutes

HELP = "measure the kernel against this GPU's limits and its peers (needs a GPU)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and percent of the limit (png, svg, pdf)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed, naming each")
    parser.add_argument("--heads", type=_numbers, metavar="LIST", help="head counts, comma separated (8,16,32,64)")
    parser.add_argument("--tokens", type=_numbers, metavar="LIST", help="token counts (1,8,64,128,1024,4096)")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out: they compile for minutes")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="where the time of some calls goes, by Nsight Compute (ncu), instead of the bench",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure every launch that a call could take, and fit the constants of the choice to this GPU",
    )
    parser.add_argument(
        "--project",
        type=Path,
        metavar="FILE",
        help="project this run, kept on an H200, to RTX 5090, RTX PRO 6000 and GB10 (needs no GPU)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for bench-GPU.json, or bench-part-GPU.json for a part of the cases (docs/measurements); "
        "bench-unfinished-GPU.json is what a killed run leaves",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and keep the run in docs/measurements; 1 with --check where a bar is missed."""
    instead = [name for name in ("project", "profile", "tune") if getattr(options, name)]
    if len(instead) > 1:
        raise OverlayError(f"ask for one of {', '.join(f'--{name}' for name in instead)}")
    if instead and (options.check or options.plot or options.no_peers):
        raise OverlayError(f"--check, --plot and --no-peers belong to the bench, not to --{instead[0]}")
    if options.project:
        return _project(options.project, options.json)
    try:
        import torch
    except ImportError as error:
        raise OverlayError(f"torch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise OverlayError("there is no GPU to measure; without one there are `compile` and `bench --project FILE`")
    from overlay import measurement, outputs
    from overlay.bench import bars, cases, report, runner

    directory = options.out or measurement.DIRECTORY
    outputs.require_folder(directory, "--out")
    if options.profile:
        return _profile(options, directory)
    if options.tune:
        return _tune(options, directory)
    if options.plot:
        outputs.require_file(options.plot, "--plot")
        report.figure_class()
    chosen = cases.grid(options.heads or cases.HEADS, options.tokens or cases.TOKENS)
    rows, stopped = [], None
    so_far, kept = None, time.monotonic()
    try:
        for row in runner.measure(chosen, with_peers=not options.no_peers):
            rows.append(row)  # one by one: what was measured in minutes is not lost with the case that ends the run
            if time.monotonic() - kept > KEEP_SECONDS:
                document = report.document(rows, bars.bars(rows), complete=False)
                so_far, kept = measurement.keep("bench-unfinished", document, directory), time.monotonic()
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        if not rows:
            raise
        stopped = error
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
        print(f"{why}\nbars are judged by the cases so far, and those without theirs are not met", file=sys.stderr)
    verdict = bars.bars(rows)
    document = report.document(rows, verdict, complete=stopped is None)
    print(json.dumps(document) if options.json else f"{document['gpu']}\n{report.text(rows, verdict)}")
    # A part of a run does not take the place of a whole one.
    whole = stopped is None and not (options.heads or options.tokens or options.no_peers)
    file = measurement.keep("bench" if whole else "bench-part", document, directory)
    if so_far is not None:
        so_far.unlink()
    print(f"kept in {file}", file=sys.stderr)
    if options.plot:
        report.plot(rows, options.plot)
    if stopped is not None:
        raise stopped
    return 1 if options.check and not all(bar.met for bar in verdict) else 0


def _profile(options: argparse.Namespace, directory: Path) -> int:
    from overlay import measurement
    from overlay.bench import cases, profile
    from overlay.table import table

    rows = profile.rows(options.heads or cases.HEADS, options.tokens or profile.TOKENS)
    document = {**measurement.provenance(), "rows": rows}
    print(json.dumps(document) if options.json else f"{document['gpu']}\n{table(*profile.cells(rows))}")
    # A part of the calls does not take the place of all.
    name = "profile-part" if options.heads or options.tokens else "profile"
    print(f"kept in {measurement.keep(name, document, directory)}", file=sys.stderr)
    return 0


def _tune(options: argparse.Namespace, directory: Path) -> int:
    import torch

    from overlay import measurement
    from overlay.bench import cases, tune
    from overlay.table import table

    sm_count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    chosen = list(tune.launches(sm_count, options.heads or cases.HEADS, options.tokens or tune.TOKENS))
    rows = list(tune.measure(chosen))
    fitted = tune.fit(rows, sm_count)
    document = {**measurement.provenance(), "sm_count": sm_count, "rows": rows, "fitted": tune.source(fitted)}
    if options.json:
        print(json.dumps(document))
    else:
        print(f"{document['gpu']}\n{table(*tune.cells(rows, sm_count, fitted))}\n\n{document['fitted']}")
    name = "tune-part" if options.heads or options.tokens else "tune"
    print(f"kept in {measurement.keep(name, document, directory)}", file=sys.stderr)
    return 0


def _project(file: Path, as_json: bool) -> int:
    from overlay.bench import projection
    from overlay.table import table

    try:
        run = json.loads(file.read_text())
        gpu, rows = run["gpu"], run["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(f"{file} is no run of this bench: {type(error).__name__}: {error}") from error
    if gpu != "NVIDIA H200":
        raise OverlayError(f"{file} was measured on {gpu}; the projection starts from an NVIDIA H200")
    headers, cells = projection.table(projection.projections(rows))
    if as_json:
        print(json.dumps([dict(zip(headers, row, strict=True)) for row in cells]))
        return 0
    print(f"A projection, not a measurement: {projection.TOKENS} tokens x {projection.COLUMNS} columns, milliseconds\n")
    print(table(headers, cells))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1 on, comma separated")
    return tuple(map(int, parts))
