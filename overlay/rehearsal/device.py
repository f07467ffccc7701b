"""What a vLLM process without a GPU is given so that it can build a model and plan its cache: tensors without memory,
a device that can be asked and not used, and the parallel groups of one rank.

Nothing here decides anything: sizes, backends and plans come from vLLM's own classes. Where one of them would really
use the GPU, PyTorch's own error names the place.
"""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from overlay.rehearsal.driver import PREFIX, Board

_DEVICE_OF = torch.Tensor.device.__get__


class WithoutMemory(TorchFunctionMode):
    """Every tensor that is made for CUDA is a meta tensor: it has shape, type and stride, and takes no memory.

    What vLLM itself makes on the meta device (a vision tower that is switched off) is remembered: it would take no
    memory on a GPU either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weightless: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = _off_cuda(asked)
        if func is torch.Tensor.to:
            args = tuple(_off_cuda(argument) for argument in args)
        result = func(*args, **kwargs)
        if func == _DEVICE_OF:  # a buffer made on another's device must not pass for vLLM's own meta tensor
            on_device = args[0].is_meta and args[0].untyped_storage()._cdata not in self.weightless
            return torch.device("cuda", 0) if on_device else result
        if asked is not None and kwargs["device"] is asked and isinstance(result, torch.Tensor) and result.is_meta:
            self.weightless.add(result.untyped_storage()._cdata)
        return result

    def device_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the tensors' storages on the device; one that several share (tied weights, views) counts once."""
        storages = (tensor.untyped_storage() for tensor in tensors)
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(size for storage, size in sizes.items() if storage not in self.weightless)


def _off_cuda(value: Any) -> Any:
    """`meta` in place of a CUDA device given by name, index or object; anything else unchanged."""
    if isinstance(value, torch.device):
        return torch.device("meta") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "meta"
    return value


class _Handle:
    """In place of a CUDA stream or event: models make them when they are built, and use them when they run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def stand_in(board: Board, memory: int) -> None:
    """Let torch.cuda answer for `board` with `memory` bytes. There is no way back: this process is a child."""
    major, minor = (int(part) for part in os.environ[PREFIX + "CAPABILITY"].split("."))
    properties = SimpleNamespace(
        name=os.environ[PREFIX + "NAME"],
        major=major,
        minor=minor,
        total_memory=memory,
        multi_processor_count=board.multiprocessors,
        shared_memory_per_block_optin=board.shared_memory,
        shared_memory_per_multiprocessor=board.shared_memory + 1024,
        warp_size=32,
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = torch.cuda.Event = torch.Stream = torch.Event = _Handle

    # vLLM asks a forked child for properties, so as not to initialise CUDA in this process.
    from vllm.platforms import cuda

    cuda.cuda_get_device_properties = lambda device, names, init_cuda=False: tuple(
        getattr(properties, name) for name in names
    )


@contextmanager
def model_under_construction(dtype: torch.dtype) -> Iterator[WithoutMemory]:
    """As vLLM's loader surrounds a model's constructor, on a device without memory."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    # The device context is inside: what it marks for CUDA then passes through the other.
    with set_default_torch_dtype(dtype), WithoutMemory() as mode, torch.device("cuda"):
        yield mode


@contextmanager
def parallel_groups(vllm_config: Any, rank: int) -> Iterator[None]:
    """vLLM's own parallel groups as `rank` of its world sees them, in this one process.

    The world is PyTorch's fake process group: every rank and size is right, nothing is ever sent. Device communicators
    and message queues need the other ranks, so groups get none.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    real = torch.distributed.new_group, parallel_state.GroupCoordinator, parallel_state._node_count

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return real[0](ranks, timeout=timeout, backend="fake", **kwargs)

    class Group(real[1]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"use_device_communicator": False, "use_message_queue_broadcaster": False}
            super().__init__(*args, **kwargs)

    torch.distributed.new_group = new_group
    parallel_state.GroupCoordinator = Group
    parallel_state._node_count = lambda group: parallel.nnodes
    try:
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=parallel.world_size_across_dp
        )
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(parallel.world_size, rank, "rehearsal://", 0, "fake")
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
                backend="fake",
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        torch.distributed.new_group, parallel_state.GroupCoordinator, parallel_state._node_count = real


def live_tensors() -> list[torch.Tensor]:
    """Every tensor alive that would be in device memory."""
    # type(), not isinstance: that asks an object for its __class__, and lazy modules answer by importing themselves.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and found.is_meta]
