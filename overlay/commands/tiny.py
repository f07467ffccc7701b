"""`python -m overlay tiny OUT`: a small checkpoint of the model family for tests, demonstrations and rehearsals."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write a small glm5_next checkpoint with seeded weights: BF16, or NVFP4 with any fault of its scales"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from overlay.checkpoint.tiny_config import HEAD_COUNTS
    from overlay.checkpoint.tiny_quant import CASES, FAULTS, METHODS

    cases = "\n".join(
        f"  {method}:\n" + "\n".join(f"    {name:30} {case.about}" for name, case in CASES[method].items())
        for method in METHODS
    )
    faults = "\n".join(f"    {name:30} {about}" for name, about in FAULTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"cases of --quant:\n{cases}\n\nfaults:\n{faults}"
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--heads", type=int, default=16, help=f"attention heads, one of {', '.join(map(str, HEAD_COUNTS))} (default 16)"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers, every fourth one sparse MLA (default 4)")
    parser.add_argument(
        "--nested", action="store_true", help="Glm5NextForConditionalGeneration with a text_config and a vision tower"
    )
    parser.add_argument(
        "--mtp", action="store_true", help="add the draft layer; vLLM speculates with it for nested checkpoints only"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bits (default 0)")
    parser.add_argument("--quant", choices=METHODS, help="NVFP4 in this format; needs --case")
    parser.add_argument("--case", help="form of the quantised checkpoint, see below")
    parser.add_argument("--fault", help="what is wrong with its scales, see below")
    parser.add_argument("--twin", metavar="OUT2", type=Path, help="also write the BF16 checkpoint of the same weights")


def run(args: argparse.Namespace) -> int:
    from overlay.checkpoint import tiny
    from overlay.checkpoint.tiny_config import CheckpointError, TinyModel
    from overlay.checkpoint.tiny_quant import CASES, choose

    model = TinyModel(heads=args.heads, layers=args.layers, nested=args.nested, mtp=args.mtp, seed=args.seed)
    if args.quant is None:
        given = [option for option in ("case", "fault", "twin") if getattr(args, option) is not None]
        if given:
            raise CheckpointError(f"--{given[0]} goes with --quant modelopt or --quant compressed-tensors")
        report(args.out, tiny.write(model, args.out), "BF16")
        return 0
    if args.case is None:
        raise CheckpointError(f"--quant {args.quant} needs --case, one of: {', '.join(CASES[args.quant])}")
    case, fault = choose(args.quant, args.case, args.fault)
    if args.twin is not None and args.twin.resolve() == args.out.resolve():
        raise CheckpointError("--twin names the folder of the checkpoint itself; give it one of its own")
    tiny.require_free(*filter(None, (args.out, args.twin)))
    size = tiny.write_quantised(model, case, fault, args.out)
    report(args.out, size, f"{args.quant} {args.case}" + (f" with {fault}" if fault else ""))
    if args.twin is not None:
        report(args.twin, tiny.write_twin(model, case, args.twin), "BF16 twin")
    return 0


def report(out: Path, size: int, what: str) -> None:
    print(f"{out}: {what}, {size / 1e6:.0f} MB")
