"""Every fault that is injected and every input that is tried without a GPU, counted while the tests run.

    python -m tests.reliability.faults

Runs the modules of docs/reliability.md and writes docs/measurements/faults-GPU.json; exits as pytest does.
"""

import re
import sys
from collections import Counter

import pytest

from overlay import measurement

# What is injected or tried, and where.
MODULES = {
    "configuration": ["tests/startup/test_config.py", "tests/startup/test_import_vllm.py"],
    "installation of vLLM": ["tests/startup/test_faults.py", "tests/startup/test_editable.py"],
    "import hooks and other tools": ["tests/startup/test_hooks.py"],
    "interpreter and PYTHONPATH": ["tests/startup/test_interpreter.py"],
    "processes of an engine": [
        "tests/patches/test_process_proof.py",
        "tests/patches/test_process_proof_apart.py",
        "tests/startup/test_live.py",
    ],
    "other people's logging": ["tests/startup/test_log.py"],
    "the rehearsal's stub driver": ["tests/rehearsal/test_driver.py"],
    "kernel cache": ["tests/kernel/test_cache.py", "tests/reliability/test_interrupted_compile.py"],
    "compiler": ["tests/kernel/test_compile.py"],
    "arguments of the kernels": ["tests/kernel/test_contract.py", "tests/kernel/test_contract_fuzz.py"],
    "safetensors headers": ["tests/checkpoint/test_audit_headers.py"],
    "the load test itself": ["tests/reliability/test_load.py"],
    "children of the GPU tests": [
        "tests/reliability/test_jobs.py",
        "tests/reliability/test_engine_driver.py",
        "tests/reliability/test_rank_child.py",
    ],
}


class Counting:
    """A pytest plugin: outcomes by file, and the examples that hypothesis made."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.examples: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid.partition("::")[0], Counter())[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        said = getattr(item, "hypothesis_statistics", "")
        tried = re.findall(r"(\d+) passing, (\d+) failing", said)
        if said and not tried:
            raise RuntimeError(f"this hypothesis says otherwise how much it tried:\n{said}")
        if tried:
            self.examples[item.nodeid.partition("[")[0]] = sum(int(count) for pair in tried for count in pair)


def summary(counting: Counting) -> dict[str, object]:
    """The measurement: tests passed and failed by subject, and inputs tried by test."""
    subjects = {}
    for subject, files in MODULES.items():
        found = sum((counting.outcomes.get(file, Counter()) for file in files), Counter())
        subjects[subject] = {"files": files, **dict(found)}
    return {
        **measurement.provenance(),
        "subjects": subjects,
        "passed": sum(counts["passed"] for counts in counting.outcomes.values()),
        "failed": sum(counts["failed"] for counts in counting.outcomes.values()),
        "inputs_tried": dict(sorted(counting.examples.items())),
    }


def main() -> int:
    counting = Counting()
    files = [file for group in MODULES.values() for file in group]
    status = pytest.main(["-q", "-m", "not gpu", *files], plugins=[counting])
    document = summary(counting)
    print(f"{document['passed']} passed, {document['failed']} failed, {sum(counting.examples.values())} inputs tried")
    print(measurement.keep("faults", document))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
