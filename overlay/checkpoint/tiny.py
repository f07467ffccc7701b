"""Write a tiny glm5_next checkpoint that vLLM loads from disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from overlay.checkpoint.tiny_config import (
    LONGEST_CONTEXT,
    CheckpointError,
    TinyModel,
    generation_config,
    model_config,
    processor_config,
)
from overlay.checkpoint.tiny_packed import quantised_weights, twin_weights
from overlay.checkpoint.tiny_quant import Case, quantization_config
from overlay.checkpoint.tiny_tokenizer import write_tokenizer
from overlay.checkpoint.tiny_weights import weights

SHARD_BYTES = 64 << 20  # small enough that every checkpoint has several shards, as big ones do


def write(model: TinyModel, out: Path) -> int:
    """Write the BF16 checkpoint of `model` into the folder `out`; return its size in bytes.

    `out` must not exist or be empty (CheckpointError otherwise), and appears complete or not at all.
    """
    return write_folder(out, model, {"config.json": model_config(model)}, weights(model))


def write_quantised(model: TinyModel, case: Case, fault: str | None, out: Path) -> int:
    """Write the NVFP4 checkpoint of `case` with `fault` in its scales; otherwise as `write`."""
    file, quantization = quantization_config(case, model)
    config = model_config(model)
    if file == "config.json":
        files = {file: {**config, "quantization_config": quantization}}
    else:
        files = {"config.json": config, file: quantization}
    return write_folder(out, model, files, quantised_weights(model, case, fault))


def write_twin(model: TinyModel, case: Case, out: Path) -> int:
    """Write the BF16 checkpoint whose weights equal the quantised ones of `case`; otherwise as `write`."""
    return write_folder(out, model, {"config.json": model_config(model)}, twin_weights(model, case))


def require_free(*folders: Path) -> None:
    """Raise CheckpointError unless each folder can be written: absent, or there and empty."""
    for folder in folders:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} exists and is not an empty folder; name a new one or remove it")


def write_folder(
    out: Path, model: TinyModel, files: dict[str, dict], tensors: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Write the JSON `files`, the `tensors`, the tokenizer and what else belongs to a checkpoint of `model`."""
    require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        scratch.chmod(0o755)
        files = {**files, "generation_config.json": generation_config()}
        if model.nested:
            files["processor_config.json"] = processor_config()
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        write_tokenizer(scratch, LONGEST_CONTEXT)
        write_tensors(scratch, tensors)
        size = sum(file.stat().st_size for file in scratch.iterdir())
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return size


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write `tensors` as numbered safetensors shards with an index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
