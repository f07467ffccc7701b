"""Child process as a user starts it, with the checkout on PYTHONPATH: what became of one selection, as JSON."""

import json
import os
import tempfile
from pathlib import Path

from tests.attention import models


def main() -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector

    from overlay import registry, startup

    def select() -> str:
        selector._cached_get_attn_backend.cache_clear()
        with set_current_vllm_config(config):
            try:
                return selector.get_attn_backend(
                    512, torch.bfloat16, "bfloat16", use_mla=True, use_sparse=True, num_heads=64
                ).get_name()
            except ValueError as error:
                return f"ValueError: {error}"

    seen: dict[str, object] = {"sitecustomize": os.path.dirname(__import__("sitecustomize").__file__)}
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(models.full_size(nested=True), Path(folder) / "model")
        arguments = EngineArgs(model=path, kv_cache_dtype="bfloat16", skip_tokenizer_init=True, max_model_len=8192)
        config = arguments.create_engine_config()
        seen["with"] = select()
        (entry,) = (entry for entry in startup.current().entries if entry.patch.id == "sparse_mla")
        seen["state"], seen["modules"] = str(entry.state), sorted(entry.modules)
        custom = EngineArgs(model=path, attention_backend="CUSTOM", skip_tokenizer_init=True).create_engine_config()
        seen["custom"] = custom.attention_config.backend.get_path()
        registry.remove(entry)
        seen["without"] = select()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
