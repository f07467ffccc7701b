"""Does the overlay reach every Python process that imports vLLM?"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from overlay.config import ROOT
from overlay.doctor.checks import Outcome, Surroundings, failed, passed, warned

EXPORT = f"export PYTHONPATH={ROOT}  (in the environment of every node, before vLLM or Ray starts)"
_WHERE = (
    "import json, sys; m = sys.modules.get('sitecustomize'); "
    "print(json.dumps([getattr(m, '__file__', None), "
    "[f.root for f in sys.meta_path if type(f).__name__ == 'VllmFinder']]))"
)

# Python's letters up to one that takes the rest of the word (-Wignore, -Xdev), with I, E or S among them.
_LONE = re.compile(r"-[^WXcm-]*[IES]")


def in_effect(around: Surroundings) -> Outcome:
    """Is this checkout's sitecustomize the one that this process loaded?"""
    if os.environ.get("OVERLAY_DISABLE") == "1":
        return failed("OVERLAY_DISABLE=1 switches the overlay off", "unset OVERLAY_DISABLE")
    loaded = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    return _judge(loaded, _finders(), "this process")


def _finders() -> list[str]:
    return [finder.root for finder in sys.meta_path if type(finder).__name__ == "VllmFinder"]


def _judge(loaded: str | None, roots: list[str], who: str) -> Outcome:
    """`roots`: folders of the overlays that wait for `import vllm`; `loaded`: the file behind sys.modules."""
    if roots and not _is_ours(roots[0]):
        return failed(f"{who} loaded the overlay in {roots[0]}, not this one in {ROOT}", EXPORT)
    if roots:
        return passed(f"{who} loaded {ROOT}/sitecustomize.py")
    if loaded is None:
        return failed(f"{who} loaded no sitecustomize", EXPORT)
    return failed(f"{who} loaded {loaded}, which comes before this overlay's", f"put {ROOT} first on PYTHONPATH")


def _is_ours(folder: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(ROOT)


def chained(around: Surroundings) -> Outcome:
    """The sitecustomize that ours shadows and runs, as Debian, Homebrew and Nix ship one."""
    others = [entry for entry in sys.path if not _is_ours(entry or os.curdir)]
    spec = PathFinder.find_spec("sitecustomize", others)
    return passed(f"runs {spec.origin} after itself" if spec and spec.origin else "no other sitecustomize to run")


def one_overlay(around: Surroundings) -> Outcome:
    """Two checkouts on the path: the first one counts, and people edit the second."""
    found = {}
    for entry in sys.path:
        folder = os.path.realpath(entry or os.curdir)
        if os.path.isfile(os.path.join(folder, "overlay", "declare.py")):
            found.setdefault(folder, entry)
    if len(found) > 1:
        return failed(f"several overlays on sys.path: {', '.join(found)}", "leave one of them on PYTHONPATH")
    return passed("one overlay on sys.path")


def pythonpath(around: Surroundings) -> Outcome:
    """Is our entry on PYTHONPATH absolute? sitecustomize corrects it for children of its own process only."""
    started_with = _initial_environment().get("PYTHONPATH", "")
    entries = [entry for entry in started_with.split(os.pathsep) if entry]
    relative = [entry for entry in entries if not os.path.isabs(entry)]
    if any(_is_ours(entry) for entry in relative):
        return warned(f"PYTHONPATH has the relative entry {relative[0]!r}, which another folder breaks", EXPORT)
    if not any(_is_ours(entry) for entry in entries):
        return failed(f"PYTHONPATH does not contain {ROOT}", EXPORT)
    return passed("this overlay's entry on PYTHONPATH is absolute")


def _initial_environment() -> dict[str, str]:
    """The environment this process was started with; os.environ may have been corrected since."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def child(around: Surroundings) -> Outcome:
    """Does a child started elsewhere, as vLLM starts its workers, load the overlay?"""
    flags = subprocess._args_from_interpreter_flags()  # what multiprocessing hands on to a spawned child
    line = [sys.executable, *flags, "-c", _WHERE]
    done = subprocess.run(line, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    try:
        loaded, roots = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return failed(f"a child process ended with status {done.returncode}: {done.stderr.strip()[-300:]}", EXPORT)
    return _judge(loaded, roots, "a child process")


def flags(around: Surroundings) -> Outcome:
    """Interpreter flags under which no PYTHONPATH or no sitecustomize counts, here and in the `vllm` launcher."""
    names = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}
    here = [flag for name, flag in names.items() if getattr(sys.flags, name)]
    if here:
        return failed(f"this Python runs under {' '.join(here)}", "start Python without it")
    launcher = shutil.which("vllm") or str(Path(sys.executable).parent / "vllm")
    if not os.path.isfile(launcher):
        return passed("no -I, -E or -S")
    with open(launcher, "rb") as file:
        first = os.fsdecode(file.readline(4096)).strip()
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    by_env = bool(words) and Path(words[0]).name == "env"
    bad = [word for word in _after_interpreter(words, by_env) if _LONE.match(word)]
    if bad:
        return failed(
            f"{launcher} starts Python with {' '.join(bad)}", f"{sys.executable} -m vllm.entrypoints.cli.main"
        )
    if words and os.path.isabs(words[0]) and not os.path.exists(words[0]):
        return warned(f"{launcher} asks for {words[0]}, which is not there", "reinstall vllm in this environment")
    # What `env` finds depends on the PATH of whoever starts it, which is not this process's to judge.
    interpreter = os.path.realpath(words[0]) if words and not by_env else ""
    if interpreter.rpartition("/")[2].startswith("python") and not _same_environment(words[0]):
        return warned(
            f"`vllm` is {launcher}, of another Python than {sys.executable}", "run the doctor with that Python"
        )
    return passed(f"no -I, -E or -S; `vllm` is {launcher}")


def _after_interpreter(words: list[str], by_env: bool) -> list[str]:
    """What a `#!` line hands to Python. `env -S python3 -s`: that -S is env's own, and Python is its first operand."""
    if by_env:
        words = list(itertools.dropwhile(lambda word: word.startswith("-") or "=" in word, words[1:]))
    return words[1:]


def _same_environment(python: str) -> bool:
    """Environments share an interpreter behind symbolic links: what tells them apart is the folder."""
    return os.path.realpath(Path(python).parent) == os.path.realpath(Path(sys.executable).parent)
