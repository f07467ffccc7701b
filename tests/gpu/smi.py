"""What nvidia-smi says, line by line."""

import subprocess
from collections.abc import Sequence


def nvidia_smi(query: str, gpus: Sequence[str] = ()) -> list[str]:
    """Lines of `--format=csv,noheader,nounits`, of `gpus` as CUDA_VISIBLE_DEVICES names them, or of all.

    No line where there is no driver, or where it does not tell.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    command += ["-i", ",".join(gpus)] if gpus else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
