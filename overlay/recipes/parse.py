"""The child of a recipe's check: hands each command line to the argument parser of the installed vLLM.

Reads a JSON list of word lists on stdin, what follows `vllm serve` in each; prints as its last line a JSON list with
None or the parser's objection to each.
"""

import json
import shlex
import sys
from typing import NoReturn


class Objection(Exception):
    """What argparse would have printed before it ends the process."""


def _object(message: str) -> NoReturn:
    raise Objection(message)


def main() -> None:
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = _object
    objections: list[str | None] = []
    for words in json.load(sys.stdin):
        try:
            validate_parsed_serve_args(parser.parse_args(words))
        except (Objection, ValueError, TypeError) as error:
            objections.append(f"{shlex.join(words)}: {error}")
        else:
            objections.append(None)
    print(json.dumps(objections))


if __name__ == "__main__":
    main()
