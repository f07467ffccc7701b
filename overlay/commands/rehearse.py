"""What vLLM would do with a checkpoint on hardware that is not there, stock and with the overlay."""

import argparse
import json
import re
import sys
from pathlib import Path

from overlay.checkpoint.findings import Finding
from overlay.errors import OverlayError
from overlay.sources import VllmSources

HELP = "without a GPU, what vLLM would do with a checkpoint on given hardware, stock and with the overlay"
PASSES_ON = (
    "any other flag is given to vllm serve as it stands, for example --kv-cache-dtype fp8 --max-model-len 131072"
)

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", type=Path, help="checkpoint folder, or its config.json"
    )
    parser.add_argument("--capability", required=True, metavar="X.Y", type=capability, help="of the GPU, such as 12.1")
    parser.add_argument("--tp", "-tp", "--tensor-parallel-size", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--kv-memory", type=size, metavar="SIZE", help="KV cache memory of one GPU, such as 24GiB")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="memory of one GPU (default: the usual board's)")
    parser.add_argument("--allowance", type=size, metavar="SIZE", help="what a boot takes besides weights and buffers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--verbose", action="store_true", help="show everything that vLLM prints, on stderr")
    parser.epilog = PASSES_ON


def run(options: argparse.Namespace) -> int:
    """Print both columns; 1 where the overlay's would not boot, or the checkpoint has an error that no patch cures."""
    from overlay.rehearsal import columns, report

    if VllmSources.find() is None:
        raise OverlayError(f"vLLM is not installed in {sys.executable}; a rehearsal runs the vLLM that would serve")
    if options.tp < 1:
        raise OverlayError(f"--tp {options.tp}: a tensor parallel size is at least 1")
    question = columns.Question(
        model=options.model,
        capability=options.capability,
        tp=options.tp,
        flags=options.passed_on,
        memory=options.memory,
        kv_memory=options.kv_memory,
        allowance=columns.ALLOWANCE if options.allowance is None else options.allowance,
    )
    answers = columns.ask(question, progress=say, output=sys.stderr if options.verbose else None)
    drafts = any(flag.startswith(("--speculative", "-sc")) for flag in options.passed_on)
    checkpoint = checkpoint_findings(options.model, answers["overlay"])
    findings = report.findings(answers["stock"], answers["overlay"]) + checkpoint
    if options.json:
        print(json.dumps(report.as_json(answers, findings), indent=2))
    else:
        print(report.as_text(answers, findings))
    stopped = any(finding.stands and (drafts or not finding.of_draft_layer) for finding in checkpoint)
    return 0 if answers["overlay"]["boots"] and not stopped else 1


def checkpoint_findings(model: Path, column: dict[str, object]) -> list[Finding]:
    """What the audit finds where `model` is a checkpoint; a configuration alone has nothing to audit."""
    folder = model.parent if model.name == "config.json" else model
    if not any(folder.glob("*.safetensors")):
        return []
    from overlay.checkpoint.audit import audit
    from overlay.rehearsal import report

    say(f"audit: headers and scales of {folder}")
    result = audit(folder)
    return [*report.stored(result.bytes, column), *result.findings]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def capability(text: str) -> tuple[int, int]:
    """`12.1`, `12.1a` or `sm_121` -> (12, 1)."""
    found = re.fullmatch(r"(?:sm_([5-9]|1\d)|(\d{1,2})\.)(\d)[af]?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability; it looks like 12.1")
    return int(found[1] or found[2]), int(found[3])


def size(text: str) -> int:
    """`24GiB`, `121.7 GiB`, `24GB` or a number of bytes -> bytes."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if unit is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; it looks like 24GiB, 24GB or 25769803776")
    size = int(float(found[1]) * unit)
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes; give a unit, such as {found[1]}GiB")
    return size
