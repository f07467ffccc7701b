"""The GPU of a probe's process, and vLLM's process groups on it."""

import contextlib
from collections.abc import Iterator

import torch


def has_gpu() -> bool:
    """Is there a GPU that torch can use? The stub driver names some that are not there."""
    if not (torch.version.cuda and torch.cuda.is_available()):
        return False
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return False
    return True


def start(device: str = "cuda:0") -> None:
    """Groups of one rank and the workspace manager, as a worker has them; single layers can then be built."""
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    if device != "cpu":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        backend = "gloo" if device == "cpu" else "nccl"
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, backend)
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device(device))


@contextlib.contextmanager
def bf16() -> Iterator[None]:
    """bf16 as torch's default, as vLLM's model loader sets it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
