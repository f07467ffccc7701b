"""kpool_block_size: on 12.x a KV block is a whole number of the indexer's 64-entry pages."""

from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present

INTERFACE = "vllm.platforms.interface"
CUDA = "vllm.platforms.cuda"
INDEXER = "vllm.v1.attention.backends.mla.indexer"
UPDATE = "Platform.update_block_size_for_backend"
ALIGNMENT = "_get_indexer_block_alignment"
PAGE = 64  # entries; DeepGEMM's paged scoring kernel for 12.x takes no other page


def probe(ctx: Context) -> Verdict:
    if not ctx.sources.has("vllm.models.glm5next"):
        return absent("this vLLM has no k-pool indexer (the first came with 0.30.0)")
    if ctx.hardware.lacks(12):
        return absent(f"{ctx.hardware.architecture} takes pages of 32 as well")
    if ctx.sources.definition(INDEXER, "Glm5NextIndexerBackend") is not None:
        return absent("the k-pool indexer's backend names its block sizes itself (from 0.32)")
    if "family(120)" in ctx.sources.source_of(CUDA, f"CudaPlatformBase.{ALIGNMENT}"):
        return absent("the CUDA platform aligns block sizes to 64-entry pages on 12.x (0.30 and 0.31)")
    return present("block sizes are aligned to pages of 32 entries, which DeepGEMM refuses on 12.x")


def whole_pages(module: ModuleType, ctx: Context) -> None:
    def update(wrapped: Any, platform: Any, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        vllm_config = args[0] if args else kwargs["vllm_config"]
        cache, model = vllm_config.cache_config, vllm_config.model_config
        pool = getattr(model.hf_text_config, "index_kpool", None) if model else None
        unit = (pool or 0) * PAGE
        capability = platform.get_device_capability()
        if (pool or 1) <= 1 or capability is None or capability.major != 12 or cache.block_size % unit == 0:
            return
        rounded = -(-cache.block_size // unit) * unit
        ctx.log.warning(
            "KV block size %d is not a whole number of the indexer's %d-token pages: %d instead",
            cache.block_size, unit, rounded,
        )  # fmt: skip
        # Again with the rounded size as if it had been asked for, so that the linear-attention pages follow it.
        asked, cache.block_size = cache.user_specified_block_size, rounded
        cache.user_specified_block_size = True
        try:
            wrapped(*args, **kwargs)
        finally:
            cache.user_specified_block_size = asked

    ctx.wrap(module, UPDATE, update)


PATCH = Patch(
    id="kpool_block_size",
    title="a KV block size that DeepGEMM's 12.x kernel cannot page",
    why=(
        "The k-pool indexer splits a block into pages of 64 entries, or of 32 where 64 does not divide it. DeepGEMM's "
        "paged kernel for 12.x takes 64 only and answers 32 with a bare AssertionError at the first decode warm-up. "
        "The day-0 images chose such sizes, and people passed --block-size 2304 by hand. Every release that has the "
        "model aligns its choice, and what --block-size asks for, to whole pages: 0.30 and 0.31 in the CUDA platform, "
        "later ones in the indexer's backend. So this stands down on all of them."
    ),
    how=(
        "After vLLM has chosen, a block that is not a whole number of pages of 64 pools is rounded up with a warning "
        "and the choice is made again from there. No --block-size is needed."
    ),
    upstream=(),
    until="nobody runs a day-0 image (vllm 0.1.dev20051 and the like)",
    targets=(Target(INTERFACE, UPDATE, ("(cls, vllm_config)",)),),
    probe=probe,
    apply={INTERFACE: whole_pages},
)
