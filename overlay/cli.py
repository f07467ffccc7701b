"""`python -m overlay <command>`: every command is a module of `overlay.commands` with HELP, add_arguments and run."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from overlay import __version__, commands
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
        subparser = subparsers.add_parser(found.name.replace("_", "-"), help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except OverlayError as error:
        print(f"overlay: {error}", file=sys.stderr)
        return 2
