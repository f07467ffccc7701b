"""The main job on a tiny model: served where there is a GPU for it, else up to where one is needed."""

import argparse
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from overlay.hardware import Hardware
from overlay.table import table

HELP = "serve a tiny model with the overlay in front; without a GPU: plan it for 2x GB10 and compile the kernel"

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
SERVE_FLAGS = ("--kv-cache-dtype", "fp8", "--max-model-len", "8192", "--max-num-seqs", "8")
SERVE_FLAGS += ("--gpu-memory-utilization", "0.5", "--no-enable-flashinfer-autotune")
LOG = Path(tempfile.gettempdir()) / "vllm-overlay-demo.log"
# The target of the rehearsal: a pair of GB10, for which most people start this.
CAPABILITY, TP, HEADS, KV_MEMORY_GIB = (12, 1), 2, 16, 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--any-gpu",
        action="store_true",
        help="serve on a GPU of capability 8.0 or newer that is not 12.x (for testing)",
    )
    parser.add_argument("--no-gpu", action="store_true", help="do what is done without a GPU, even where there is one")
    parser.add_argument("--log", type=Path, default=LOG, help=f"the server's log ({LOG})")


def run(options: argparse.Namespace) -> int:
    """Serve or rehearse; 0 only where all that was tried went through."""
    hardware = Hardware()
    with tempfile.TemporaryDirectory(prefix="overlay-demo-") as scratch:
        checkpoint = Path(scratch) / "tiny"
        with step(f"a tiny glm5_next checkpoint ({HEADS} heads, 4 layers, random weights)"):
            write_checkpoint(checkpoint)
        usable = can_serve(hardware.capability, options.any_gpu)
        if usable and not options.no_gpu:
            return serve_it(checkpoint, hardware, options.log, Path(scratch))
        return rehearse_it(checkpoint, hardware, usable)


def can_serve(capability: tuple[int, int] | None, any_gpu: bool) -> bool:
    """Whether the GPU is of the family that the kernel is made for, or is opened for testing and can run it."""
    return capability is not None and (capability[0] == 12 or (any_gpu and capability >= (8, 0)))


def write_checkpoint(folder: Path) -> None:
    from overlay.checkpoint import tiny
    from overlay.checkpoint.tiny_config import TinyModel

    tiny.write(TinyModel(heads=HEADS), folder)


def serve_it(checkpoint: Path, hardware: Hardware, log: Path, scratch: Path) -> int:
    """The real server: one completion over HTTP, with the backend and the patches behind it."""
    from overlay import serving

    base = dict(os.environ)
    if hardware.capability[0] != 12:
        config = scratch / "patches.toml"
        config.write_text('[patches.sparse_mla]\nother_capabilities = "{}.{}"\n'.format(*hardware.capability))
        base["OVERLAY_CONFIG"] = str(config)
        say(f"{hardware.name} is not of capability 12.x: the backend is opened for it, for testing")
    say(f"vllm serve on {hardware.name}; its log is {log}")
    with serving.serve(checkpoint, SERVE_FLAGS, log, base=base, progress=say) as server:
        answer = server.completion(PROMPT)
        processes = server.processes()
        attention = server.attention()
    text = answer["choices"][0]["text"]
    print(f"\nprompt      {PROMPT!r}\nanswer      {text!r} (random weights: it means nothing)")
    print(f"attention   {attention or 'the overlay named no backend'}\n")
    rows = [(p["pid"], ", ".join(f"{k} {v}" for k, v in p.get("patches", {}).items()) or "none") for p in processes]
    print(table(("process", "patches"), rows))
    print(f"\nserved and stopped; the log is {log}")
    ours = attention is not None and attention.startswith("OVERLAY_SPARSE_MLA")
    return 0 if ours and text else 1


def rehearse_it(checkpoint: Path, hardware: Hardware, usable: bool) -> int:
    """Everything up to where a GPU is needed, and in plain words what was not run."""
    from overlay.commands import compile as compile_command
    from overlay.recipes.check import GEOMETRY
    from overlay.rehearsal import columns, report

    questions = {
        "the tiny checkpoint, bf16 KV cache": (checkpoint, "bfloat16"),
        "GLM-5.3-Flash's full-size geometry, fp8 KV cache": (GEOMETRY, "fp8"),
    }
    target = "{}.{}".format(*CAPABILITY)
    with step(f"vLLM's own plan for {TP} GPUs of capability {target}, stock and with the overlay"):
        answers = columns.ask_all(
            [
                columns.Question(model, CAPABILITY, TP, ("--kv-cache-dtype", dtype), kv_memory=KV_MEMORY_GIB << 30)
                for model, dtype in questions.values()
            ],
            progress=say,
        )
    for title, both in zip(questions, answers, strict=True):
        print(f"\n== {title}, capability {target}, TP {TP} ==\n")
        found = report.told(report.findings(**both))
        print("\n\n".join(filter(None, (report.side_by_side(both), report.reasons(both), found))))
    print(f"\n== the patches in the overlay's process ==\n\n{report.patches(answers[-1]['overlay'])}")
    show_experts(checkpoint.parent)
    print("\n== the kernel, compiled for sm_120 and sm_121 ==\n", flush=True)
    with step("compiling"):
        compiled = compile_command.run(argparse.Namespace(arch="sm_120,sm_121", json=False))
    print(f"\n{not_run(hardware, usable)}")
    return 0 if compiled == 0 and all(both["overlay"]["boots"] for both in answers) else 1


def show_experts(scratch: Path) -> None:
    """A weight-only NVFP4 checkpoint, loaded on the CPU: what stock experts multiply by, and the overlay's route."""
    from overlay.checkpoint import tiny, tiny_quant
    from overlay.checkpoint.tiny_config import TinyModel
    from overlay.nvfp4 import show

    checkpoint = scratch / "weight-only"
    case, fault = tiny_quant.choose("modelopt", "nested_no_groups", None)
    with step("a weight-only NVFP4 checkpoint that vLLM takes for W4A4, loaded stock and with the overlay"):
        tiny.write_quantised(TinyModel(heads=HEADS), case, fault, checkpoint)
        outcomes = show.compare(checkpoint, CAPABILITY)
    print(f"\n== NVFP4 experts of a checkpoint without activation scales ==\n\n{show.as_text(outcomes)}")


def not_run(hardware: Hardware, usable: bool) -> str:
    """What this machine did not show, and how to see it."""
    if usable:
        why = "--no-gpu was given"
    elif hardware.capability is None:
        why = "there is no NVIDIA GPU here"
    else:
        why = "the GPU here is {} of capability {}.{}; --any-gpu serves on it".format(
            hardware.name, *hardware.capability
        )
    return (
        f"Not run, because {why}: the kernels, ours and the experts', and the server.\n"
        "The plans above are vLLM's own code under a stub driver and need no weights. Those of the NVFP4 checkpoint\n"
        "were loaded on the CPU, up to the kernels that would multiply by the numbers shown."
    )


@contextmanager
def step(title: str):
    """Say what begins, and how long it took."""
    started = time.monotonic()
    say(f"{title} ...")
    yield
    say(f"{title}: done in {time.monotonic() - started:.0f} s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
