"""`python -m overlay <command>`: every command is a module of `overlay.commands` with HELP, add_arguments and run."""

import argparse
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence

from overlay import __version__, carried, commands
from overlay.errors import OverlayError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; 2 for an error that the overlay names, else the command's status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlay", description="Patches for serving sparse-MLA models with vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for found in pkgutil.iter_modules(commands.__path__):
        module = importlib.import_module(f"overlay.commands.{found.name}")
        passes_on = hasattr(module, "PASSES_ON")  # flags it does not know are vLLM's, whole or not at all
        subparser = subparsers.add_parser(
            found.name.replace("_", "-"), help=module.HELP, description=module.HELP, allow_abbrev=not passes_on
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, passes_on=passes_on)
    options, options.passed_on = parser.parse_known_args(arguments)
    if options.passed_on and not options.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(options.passed_on)}")
    carried.extend_path()
    try:
        return options.run(options)
    except OverlayError as error:
        return _refused(str(error), options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "overlay"):
            raise
        return _refused(f"{package} is not installed in {sys.executable}; use the Python that has vLLM", options)
    except KeyboardInterrupt:
        print("overlay: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _refused(why: str, options: argparse.Namespace) -> int:
    print(f"overlay: {why}", file=sys.stderr)
    if getattr(options, "json", None) is True:  # who reads JSON from stdout finds some there whatever happened
        print(json.dumps({"error": why}, indent=2))
    return 2
