"""Write a tiny glm5_next checkpoint that vLLM loads from disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from overlay.checkpoint.tiny_config import CheckpointError, TinyModel, generation_config, model_config, processor_config
from overlay.checkpoint.tiny_tokenizer import write_tokenizer
from overlay.checkpoint.tiny_weights import weights

SHARD_BYTES = 64 << 20  # small enough that every checkpoint has several shards, as big ones do


def write(model: TinyModel, out: Path) -> int:
    """Write the checkpoint of `model` into the folder `out`; return its size in bytes.

    `out` must not exist or be empty (CheckpointError otherwise), and appears complete or not at all.
    """
    return write_folder(out, model, model_config(model), weights(model))


def write_folder(
    out: Path, model: TinyModel, config: dict, tensors: Iterable[tuple[str, torch.Tensor]], extra: dict | None = None
) -> int:
    """Write config.json with `config`, the `tensors`, the JSON files of `extra` (name to content) and the tokenizer."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; name a new one or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        scratch.chmod(0o755)
        files = {"config.json": config, "generation_config.json": generation_config(), **(extra or {})}
        if model.nested:
            files["processor_config.json"] = processor_config()
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        write_tokenizer(scratch, config.get("text_config", config)["max_position_embeddings"])
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
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
