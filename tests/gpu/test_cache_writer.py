"""vLLM's own cache writer with a rope of width 0: strided blocks as the hybrid layout has them, and skipped slots.

Our backend leaves the writing to `concat_and_cache_mla`, whose compiled half was made for rows with rope.
"""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
ops = pytest.importorskip("vllm._custom_ops")

pytestmark = pytest.mark.gpu

LATENT = 512
# (blocks, tokens of a block, rows from block to block, rows before the first): one small, and the layout that vLLM's
# planner makes of the full-size model at TP 1.
LAYOUTS = {"small": (7, 64, 83, 5), "full size": (6, 4352, 9009, 281)}


def cache_of(dtype, blocks, block_size, stride_rows, first_row):
    """The pool, filled with a pattern no write produces, and the cache's view of it."""
    pool = torch.full(((first_row + blocks * stride_rows) * LATENT,), 77.0, device="cuda", dtype=torch.bfloat16)
    if dtype != "bfloat16":
        pool = torch.full((pool.numel(),), 0x55, device="cuda", dtype=torch.uint8)
    shape, strides = (blocks, block_size, LATENT), (stride_rows * LATENT, LATENT, 1)
    return pool, pool.as_strided(shape, strides, first_row * LATENT)


def write(cache, latents, slots, dtype, k_scale, **flags):
    rope = torch.empty(len(latents), 0, device="cuda", dtype=torch.bfloat16)
    ops.concat_and_cache_mla(latents, rope, cache, slots, kv_cache_dtype=dtype, scale=k_scale, **flags)
    torch.cuda.synchronize()


def expected_rows(latents, dtype, k_scale):
    if dtype == "bfloat16":
        return latents
    return (latents.float() / k_scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def assert_rows(rows, wanted, exact):
    """Equal to the bit; where a scale was divided by, an e4m3 code may be the next one."""
    if not exact and rows.dtype == torch.uint8:
        rows, wanted = (x.view(torch.float8_e4m3fn).float() for x in (rows, wanted))
        assert float((rows != wanted).float().mean()) < 1e-3
        torch.testing.assert_close(rows, wanted, rtol=2**-3, atol=2**-9)
        return
    assert torch.equal(rows, wanted)


def flags_of(scale):
    """`skip_scale` came with a release; where it is, vLLM sets it exactly for a scale of 1."""
    import inspect

    known = "skip_scale" in inspect.signature(ops.concat_and_cache_mla).parameters
    return {"skip_scale": scale == 1.0} if known else {}


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_land_in_their_slots_and_nothing_else_is_touched(layout, dtype, scale):
    blocks, block_size, _, _ = LAYOUTS[layout]
    pool, cache = cache_of(dtype, *LAYOUTS[layout])
    before = pool.clone()
    generator = torch.Generator("cuda").manual_seed(3)
    tokens = 97
    latents = (torch.randn(tokens, LATENT, device="cuda", generator=generator) * 3).to(torch.bfloat16)
    slots = torch.randperm(blocks * block_size, device="cuda", generator=generator)[:tokens]
    slots[0], slots[1] = 0, blocks * block_size - 1
    skipped = torch.arange(tokens, device="cuda") % 5 == 4
    slots[skipped] = -1
    k_scale = torch.tensor(scale, device="cuda")
    write(cache, latents, slots, dtype, k_scale, **flags_of(scale))

    wanted = expected_rows(latents, dtype, k_scale)
    written = slots[~skipped]
    assert_rows(cache[written // block_size, written % block_size], wanted[~skipped], exact=scale == 1.0)
    untouched = torch.ones_like(pool, dtype=torch.bool)
    mask = untouched.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    mask[written // block_size, written % block_size] = False
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_slots_alone_decide_how_many_rows_are_written(dtype):
    """A CUDA graph pads the latents; the slots cover the tokens that are there."""
    pool, cache = cache_of(dtype, *LAYOUTS["small"])
    before = pool.clone()
    latents = torch.ones(8, LATENT, device="cuda", dtype=torch.bfloat16)
    write(cache, latents, torch.full((8,), -1, device="cuda"), dtype, torch.ones((), device="cuda"))
    assert torch.equal(pool, before)
    write(cache, latents, torch.tensor([3], device="cuda"), dtype, torch.ones((), device="cuda"))
    assert int((pool != before).sum()) == LATENT


def test_a_pool_of_more_than_two_to_the_31_elements():
    """The row behind element 2^31 of an fp8 pool is written, and not the one that 32 bits would name."""
    stride_rows, block_size = 9009, 4352
    blocks = 2**31 // (stride_rows * LATENT) + 2
    if torch.cuda.mem_get_info()[0] < blocks * stride_rows * LATENT + (1 << 30):
        pytest.skip("needs 3.2 GB of free GPU memory")
    pool = torch.zeros(blocks * stride_rows * LATENT, device="cuda", dtype=torch.uint8)
    cache = pool.as_strided((blocks, block_size, LATENT), (stride_rows * LATENT, LATENT, 1))
    latents = torch.full((1, LATENT), 2.0, device="cuda", dtype=torch.bfloat16)
    write(cache, latents, torch.tensor([blocks * block_size - 1], device="cuda"), "fp8", torch.ones((), device="cuda"))
    assert torch.equal(cache[-1, -1], expected_rows(latents, "fp8", torch.ones((), device="cuda"))[0])
    assert int(pool.count_nonzero()) == LATENT
