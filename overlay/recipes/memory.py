"""Does it fit: the published checkpoint against a card, by the geometry of GLM-5.3-Flash. A rehearsal asks vLLM."""

from dataclasses import dataclass

from overlay.recipes.declare import Recipe

GIB = 1024**3
# LibertAIDAI/GLM-5.3-Flash-NVFP4 as its makers give it: routed experts in 4 bits, everything else BF16.
WEIGHTS_GIB = 181.3
# Of these, what is not loaded without drafting: the experts of the draft layer, and its attention in BF16.
DRAFT_GIB = 4.2
# And what every rank keeps whole: routers, indexers, the down-projections of attention, hyper-connections.
WHOLE_GIB = 0.7
# Activations, CUDA graphs, the CUDA context and NCCL; a rehearsal uses the same figure.
ALLOWANCE_GIB = 3.0

SPARSE_LAYERS = 11  # of 45; the other 34 keep a state per request, not rows per token
LATENT_WIDTH = 512
INDEX_BYTES = 132 / 4  # the indexer stores 128 fp8 values and an fp32 scale for every pool of 4 tokens
ROW_BYTES = {"fp8": LATENT_WIDTH, "bfloat16": 2 * LATENT_WIDTH, "fp8_ds_mla": 656}


@dataclass(frozen=True)
class Budget:
    """GiB of one GPU, and the tokens that what is left holds at most.

    vLLM's planner also places the states of the linear-attention layers, and comes to fewer: `recipe NAME --check`.
    """

    memory: float
    utilization: float
    weights: float
    allowance: float
    left: float
    token_bytes: int
    tokens: int

    @property
    def fits(self) -> bool:
        return self.left > 0

    def __str__(self) -> str:
        start = f"{self.memory:.2f} GiB x {self.utilization:g} - {self.weights:.2f} (weights) - {self.allowance:.2f}"
        end = f" = {self.left:.2f} GiB for the KV cache"
        tokens = f", at most {self.tokens:,} tokens of {self.token_bytes:,} bytes" if self.fits else ": it does not fit"
        return f"{start} (activations, graphs, CUDA, NCCL){end}{tokens}"


def token_bytes(kv_cache_dtype: str, draft_layer: bool) -> int:
    """Bytes a token takes in the caches of all sparse layers; equal on every rank, since MLA's rows are not split.

    The blocks that vLLM plans are larger by up to 1 % (tests compare with its planner).
    """
    return round((SPARSE_LAYERS + draft_layer) * (ROW_BYTES[kv_cache_dtype] + INDEX_BYTES))


def budget(recipe: Recipe, kv_cache_dtype: str = "fp8") -> Budget:
    """The sum for one GPU of a recipe."""
    loaded = WEIGHTS_GIB - (0 if recipe.draft_tokens else DRAFT_GIB)
    weights = (loaded - WHOLE_GIB) / recipe.gpus + WHOLE_GIB
    left = recipe.memory * recipe.utilization - weights - ALLOWANCE_GIB
    each = token_bytes(kv_cache_dtype, recipe.draft_tokens > 0)
    tokens = max(int(left * GIB / each), 0)
    return Budget(recipe.memory, recipe.utilization, weights, ALLOWANCE_GIB, left, each, round(tokens, -3))
