"""Found through PYTHONPATH at the start of every Python process: waits for `import vllm` and delegates to `overlay`.

This file runs in every interpreter that inherits the variable (pip, ninja's helpers, multiprocessing's resource
tracker), so it uses nothing that is not already loaded, prints nothing, and cannot break the process. What can go wrong
is checked where vLLM is imported: an exception raised here would be printed and ignored, and an unpatched engine would
serve.
"""

import os
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))


class VllmFinder:
    """Meta-path finder that recognises the import of `vllm` and no other."""

    root = ROOT

    def find_spec(self, name, path=None, target=None):
        """Return vLLM's own spec with the overlay's start-up in front of its execution; None for any other name."""
        if name != "vllm":
            return None
        from overlay import startup

        return startup.find_vllm(self, path, target)


def keep_pythonpath_absolute():
    """Replace our own entry by its absolute form: a relative one is lost to children after a chdir."""
    value = os.environ.get("PYTHONPATH")
    if not value:
        return
    entries = value.split(os.pathsep)
    absolute = [ROOT if os.path.abspath(entry or os.curdir) == ROOT else entry for entry in entries]
    if absolute != entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)


def install():
    """Put one finder in front of the meta path: a second load, or a second checkout on the path, adds none."""
    if any(type(finder).__name__ == VllmFinder.__name__ for finder in sys.meta_path):
        return
    keep_pythonpath_absolute()
    sys.meta_path.insert(0, VllmFinder())


def chain():
    """Execute the sitecustomize that ours shadows (Debian, Homebrew and Nix ship one), as if it had been found.

    Each folder's is executed once in a process. The next one may be another checkout of ours, or any file that looks
    for the one behind itself, and would execute this one again: both go on behind the folders that had their turn.
    """
    from importlib.machinery import PathFinder

    had_their_turn = sys.__dict__.setdefault("_overlay_chained", set())
    had_their_turn.add(os.path.realpath(ROOT))
    for entry in sys.path:
        folder = os.path.realpath(entry or os.curdir)
        spec = None if folder in had_their_turn else PathFinder.find_spec("sitecustomize", [entry])
        if spec is not None and spec.loader is not None:
            from importlib.util import module_from_spec  # 4 ms of imports: only where there is something to chain

            had_their_turn.add(folder)
            spec.loader.exec_module(module_from_spec(spec))
            return


if os.environ.get("OVERLAY_DISABLE") != "1":
    install()
chain()
