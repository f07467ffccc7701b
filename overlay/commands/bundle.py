"""A folder that carries the overlay and its packages into a container."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from overlay import bundle

HELP = "make a folder with the overlay and the packages that a vLLM image lacks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    here = os.uname().machine
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--python",
        default=f"{sys.version_info[0]}.{sys.version_info[1]}",
        metavar="X.Y",
        help="the image's Python (default: this one, %(default)s)",
    )
    parser.add_argument("--platform", default=here, choices=bundle.MACHINES, help=f"the processor (default: {here})")
    parser.add_argument(
        "--cuda", type=int, default=13, choices=bundle.CUDA_VERSIONS, help="the image's CUDA (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the bundle and print how it is used."""
    packages = bundle.build(options.out, options.python, options.platform, options.cuda)
    out = options.out.resolve()
    print(f"{out}: the overlay, and {packages.name} packages of {bundle.size(packages) / 1e6:.0f} MB")
    mount = shlex.quote(f"{out}:/opt/overlay:ro")
    print(f"  docker run --gpus all --ipc host -v {mount} -e PYTHONPATH=/opt/overlay IMAGE ...")
    return 0
