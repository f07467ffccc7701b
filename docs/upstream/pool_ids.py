"""Token indices that GLM-5.3's sparse indexer makes of garbage pool ids. CPU only: python pool_ids.py"""

import os

# Both before triton is imported: the kernel runs on the CPU, and vLLM keeps Triton although no driver is active.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from importlib.metadata import version

POOL = 4
SEQUENCE = 13  # tokens, so pools 0 to 2 and one token of a fourth


def reproduce() -> dict[str, object]:
    """What the real kernel expands a row of pool ids to, two of which no sequence of 13 tokens has."""
    import torch
    from vllm.models.glm5next.nvidia.ops.kpool_compress import expand_pools_and_append_tail

    ids = torch.tensor([[0, 2, 1_000_000, -1]], dtype=torch.int32)
    row = expand_pools_and_append_tail(ids, torch.tensor([SEQUENCE], dtype=torch.int32), POOL)[0].tolist()
    return {"row": row, "wrong": [token for token in row if token >= SEQUENCE]}


if __name__ == "__main__":
    result = reproduce()
    print(f"vllm {version('vllm')}: pool ids 0, 2, 1000000, -1 of a sequence of {SEQUENCE} tokens become")
    print(result["row"])
    print(f"{len(result['wrong'])} of them are past the end of the sequence: {result['wrong']}")
