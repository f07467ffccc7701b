"""The CPU suite on several vLLM releases, and docs/versions.md: which patch is on in which of them.

    python -m tests.matrix [--versions 0.27.1,0.30.0,...] [--cache DIR] [--states-only] [TEST ...]

A release's wheel is downloaded and unpacked once (0.3 GB, 0.8 GB unpacked); its files come before those of the
installed vLLM, whose environment serves them all, with an empty package in the place of its DeepGEMM. Exit status 1
where a test or a patch failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.rehearsal import driver
from overlay.sources import VllmSources
from overlay.table import table
from tests.conftest import ROOT, without_overlay

VERSIONS = ("0.27.1", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
# What depends on the installed vLLM. The rest of the suite is about this project's own files.
TESTS = ("tests/attention", "tests/nvfp4", "tests/patches", "tests/probe", "tests/rehearsal", "tests/startup")
# Releases before 0.30 have no sparse-MLA model without rope: NVFP4 and the other patches are what is for them.
TESTS_WITHOUT_THE_MODEL = ("tests/nvfp4", "tests/patches", "tests/probe")
FIRST_WITH_THE_MODEL = (0, 30)
# GPUs that the states are asked for: NVML knows no memory of an integrated one.
BOARDS = {"GB10": ((12, 1), 0), "RTX PRO 6000": ((12, 0), 96 << 30)}
PAGE = ROOT / "docs" / "versions.md"


@dataclass(frozen=True)
class Outcome:
    """One release: its patches' states by board, and its tests' counts (None: they were not run)."""

    version: str
    states: dict[str, dict[str, dict[str, str]]]
    tests: dict[str, int] | None

    @property
    def failed(self) -> bool:
        states = (state["state"] for board in self.states.values() for state in board.values())
        return "failed" in states or bool(self.tests and self.tests["failed"])


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overlay" / "wheels"


def release_folder(version: str, cache: Path) -> Path | None:
    """The folder to put on PYTHONPATH for a release; None for the installed one. Downloads and unpacks at need."""
    if VllmSources.find().version == version:
        return None
    folder = cache / version
    if not (folder / "vllm").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = ["download", "--no-deps", "--only-binary=:all:", "-q", "-d", scratch, f"vllm=={version}"]
            subprocess.run([sys.executable, "-m", "pip", *command], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            shutil.rmtree(folder, ignore_errors=True)
            unpacked.rename(folder)
    replace_deep_gemm(folder)
    return folder


def replace_deep_gemm(folder: Path) -> None:
    """Put an empty `deep_gemm`, the name that vLLM imports first, beside a release's files.

    The copy within a wheel is built for that release's own torch and does not load here. No test runs it; but where
    there is none, vLLM refuses to build the classes that would.
    """
    package = folder / "deep_gemm" / "__init__.py"
    package.parent.mkdir(exist_ok=True)
    package.write_text("")


def environment(folder: Path | None) -> dict[str, str]:
    env = without_overlay(os.environ)
    paths = [str(folder)] if folder else []
    return {**env, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])}


def states(folder: Path | None) -> dict[str, dict[str, dict[str, str]]]:
    """What `status` says of every patch on each board, with those that are off by default switched to auto."""
    from overlay import registry

    switches = ",".join(f"{patch.id}=auto" for patch in registry.declarations() if patch.default is False)
    answer = {}
    for board, (capability, memory) in BOARDS.items():
        env = driver.environment(capability, memory=memory, base=environment(folder))
        command = [sys.executable, "-m", "overlay", "status", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=env | {"OVERLAY_PATCHES": switches}, stdout=subprocess.PIPE, text=True
        )
        answer[board] = {patch["id"]: patch for patch in json.loads(done.stdout)["patches"]}
    return answer


def run_tests(folder: Path | None, paths: list[str]) -> dict[str, int]:
    """Counts of passed, skipped and failed tests; pytest's own report goes to this process's output."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "not gpu", f"--junitxml={report}", *paths]
        subprocess.run(command, cwd=ROOT, env=environment(folder))
        if not report.exists():
            return {"passed": 0, "skipped": 0, "failed": 1}
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - counts["skipped"] - failed, "skipped": counts["skipped"], "failed": failed}


def page(outcomes: list[Outcome]) -> str:
    """docs/versions.md."""
    from overlay import registry

    versions = [outcome.version for outcome in outcomes]
    patches = list(outcomes[0].states["GB10"])
    off = {patch.id for patch in registry.declarations() if patch.default is False}
    lines = [
        "# vLLM releases",
        "",
        "Written by `make test-matrix`. Each release's files in front of one environment, that of the newest release,",
        "with an empty DeepGEMM (theirs is for another torch); GPUs that are not there (python -m overlay status under",
        "the rehearsal's driver).",
        "",
        "## Which patch is on",
        "",
        "As `auto` decides, on a GB10 and on an RTX PRO 6000 (where it differs: GB10 / RTX). * off by default.",
        "",
        markdown(
            ["patch", *versions],
            [[f"{patch} *" if patch in off else patch, *(cell(o, patch) for o in outcomes)] for patch in patches],
        ),
        "",
        "Why not:",
        "",
    ]
    for patch in patches:
        for reason, where in reasons(outcomes, patch).items():
            lines.append(f"- `{patch}`: {reason} ({', '.join(where)})")
    tested = [outcome for outcome in outcomes if outcome.tests]
    if tested:
        rows = [[o.version, *(str(o.tests[name]) for name in ("passed", "skipped", "failed"))] for o in tested]
        lines += ["", "## Tests", "", markdown(["vllm", "passed", "skipped", "failed"], rows)]
    return "\n".join(lines) + "\n"


def cell(outcome: Outcome, patch: str) -> str:
    found = [board[patch]["state"] for board in outcome.states.values()]
    return " / ".join(found) if len(set(found)) > 1 else found[0]


def reasons(outcomes: list[Outcome], patch: str) -> dict[str, list[str]]:
    """Each reason why a patch is not armed, with where it holds."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for board, patches in outcome.states.items():
            if patches[patch]["state"] != "armed":
                found.setdefault(patches[patch]["reason"], []).append(f"{outcome.version} {board}")
    everywhere = [f"{outcome.version} {board}" for outcome in outcomes for board in outcome.states]
    by_board = {board: [place for place in everywhere if place.endswith(board)] for board in BOARDS}
    return {reason: shorter(where, everywhere, by_board) for reason, where in found.items()}


def shorter(where: list[str], everywhere: list[str], by_board: dict[str, list[str]]) -> list[str]:
    """Places in the fewest words: everywhere, a board on every release, a release on every board."""
    if where == everywhere:
        return ["everywhere"]
    for board, places in by_board.items():
        if where == places:
            return [f"every release, {board}"]
    versions = dict.fromkeys(place.split()[0] for place in where)
    whole = [v for v in versions if sum(place.split()[0] == v for place in where) == len(by_board)]
    return [*whole, *(place for place in where if place.split()[0] not in whole)]


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--versions", default=",".join(VERSIONS), help="comma-separated (default: all five)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where wheels are unpacked")
    parser.add_argument("--states-only", action="store_true", help="run no tests")
    parser.add_argument("tests", nargs="*", help="pytest's paths (default: what depends on vLLM)")
    options = parser.parse_args(arguments)
    outcomes = []
    for version in options.versions.split(","):
        print(f"=== vllm {version}", flush=True)
        folder = release_folder(version, options.cache)
        tests = None if options.states_only else run_tests(folder, options.tests or tests_of(version))
        outcomes.append(Outcome(version, states(folder), tests))
    print(summary(outcomes))
    if tuple(outcome.version for outcome in outcomes) == VERSIONS:
        PAGE.write_text(page(outcomes))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def tests_of(version: str) -> list[str]:
    with_model = tuple(int(part) for part in version.split(".")[:2]) >= FIRST_WITH_THE_MODEL
    return list(TESTS if with_model else TESTS_WITHOUT_THE_MODEL)


def summary(outcomes: list[Outcome]) -> str:
    def row(outcome: Outcome) -> list[Any]:
        found = [patch["state"] for patch in outcome.states["GB10"].values()]
        counts = outcome.tests or dict.fromkeys(("passed", "skipped", "failed"), "-")
        return [outcome.version, found.count("armed"), found.count("retired"), found.count("failed"), *counts.values()]

    headers = ("vllm", "armed", "retired", "failed", "tests passed", "skipped", "failed")
    return table(headers, [row(outcome) for outcome in outcomes])


if __name__ == "__main__":
    sys.exit(main())
