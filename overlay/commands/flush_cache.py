"""Make room for the driver of an integrated GPU, before or while a model loads."""

import argparse
import json
import time
from dataclasses import asdict

from overlay import host_memory
from overlay.host_memory import GIB, HostMemory, MemoryShortage
from overlay.table import table

HELP = "drop the page cache, which the driver of an integrated GPU (GB10) does not reclaim"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="DIR", help="only this checkpoint's pages (folder or Hugging Face name); needs no root"
    )
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="again every so often, until interrupted")
    parser.add_argument(
        "--below", type=float, default=8.0, metavar="GIB", help="with --watch: only while less is free (default 8)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Drop once and print what it gave, or watch. Raises MemoryShortage saying how, where it may not."""
    drop = dropper(options.model)
    before = host_memory.read()
    drop()
    report(before, host_memory.read(), options.json)
    try:
        while options.watch:
            time.sleep(options.watch)
            before = host_memory.read()
            if before.free < options.below * GIB:
                drop()
                report(before, host_memory.read(), options.json)
    except KeyboardInterrupt:
        pass
    return 0


def dropper(model: str | None):
    """What to call to drop pages: one checkpoint's, or all of the machine's."""
    if model is None:
        return drop_everything
    if not host_memory.checkpoint_files(model):
        raise MemoryShortage(f"{model} is neither a folder with files over 1 MiB nor a model in the Hugging Face cache")
    return lambda: host_memory.drop_files(host_memory.checkpoint_files(model))


def drop_everything() -> None:
    try:
        host_memory.drop_everything()
    except OSError as error:
        raise MemoryShortage(
            f"{host_memory.DROP_CACHES} cannot be written here ({error.strerror}). As root on the host:\n"
            f"    sync && echo 1 > {host_memory.DROP_CACHES}\n"
            "without root, one checkpoint's pages:\n"
            "    python -m overlay flush-cache --model /path/to/checkpoint"
        ) from None


def report(before: HostMemory, after: HostMemory, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"before": asdict(before), "after": asdict(after)}), flush=True)
        return
    rows = (
        (label, host_memory.gib(getattr(before, name)), host_memory.gib(getattr(after, name)))
        for label, name in (("MemFree", "free"), ("MemAvailable", "available"), ("page cache", "page_cache"))
    )
    print(table(("memory", "before", "after"), rows), flush=True)
