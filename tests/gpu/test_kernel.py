"""The attention kernel on the GPU: what it computes, for which shapes, and what it must not read."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from dataclasses import replace  # noqa: E402

from tests.gpu import kernel_cases as cases  # noqa: E402

pytestmark = pytest.mark.gpu
every_shape = pytest.mark.parametrize(("heads", "kv_dtype"), cases.SHAPES)


# --- masks -----------------------------------------------------------------------------------------------------------


@every_shape
def test_tokens_without_a_valid_index(heads, kv_dtype):
    case = cases.make_case(9, heads, kv_dtype, 200)
    case.indices[[0, 4, 8]] = -1
    cases.run_and_check(case)
    case.indices.fill_(-1)
    out, lse = cases.run_and_check(case)
    assert (out == 0).all() and lse.isneginf().all()


@pytest.mark.parametrize(
    "pattern", ["leading", "middle", "alternating", "first", "last", "first of tiles", "odd tiles"]
)
@every_shape
def test_mask_patterns(heads, kv_dtype, pattern):
    case = cases.make_case(3, heads, kv_dtype, 330)
    column = torch.arange(330, device=case.indices.device)
    dead = {
        "leading": column < 70,
        "middle": (column >= 96) & (column < 160),
        "alternating": column % 2 == 0,
        "first": column != 0,
        "last": column != 329,
        "first of tiles": column % 16 != 0,
        "odd tiles": column // 16 % 2 == 1,
    }[pattern]
    case.indices[:, dead] = -1
    cases.run_and_check(case)
    cases.run_and_check(case, splits=3)


@every_shape
def test_unselected_rows_do_not_matter(heads, kv_dtype):
    case = cases.make_case(5, heads, kv_dtype, 500, valid=300)
    case.indices[case.indices == 0] = 1
    before, _ = cases.run_and_check(case)
    named = case.indices[case.indices >= 0].long().unique()
    poison = torch.ones(case.kv_rows.shape[0], dtype=torch.bool, device=named.device)
    poison[named] = False
    assert poison[0]
    if kv_dtype == "fp8":
        codes = case.kv_rows.view(torch.uint8).clone()
        codes[poison] = 0x7F  # the NaN code
        poisoned = replace(case, kv_rows=codes.view(torch.float8_e4m3fn))
    else:
        rows = case.kv_rows.clone()
        rows[poison] = torch.nan
        rows[poison.nonzero()[1::2].flatten()] = torch.inf
        poisoned = replace(case, kv_rows=rows)
    after, _ = cases.call(poisoned)
    assert torch.equal(before, after)


@every_shape
def test_indices_beyond_the_rows_are_skipped(heads, kv_dtype):
    case = cases.make_case(4, heads, kv_dtype, 256, rows=1000)
    case.indices[:, ::3] = 1000
    case.indices[:, 1::7] = 2**31 - 1
    case.indices[:, 2::11] = -(2**31)
    case.indices[3] = 5_000_000
    out, _ = cases.run_and_check(case)
    assert (out[3] == 0).all()


@every_shape
def test_duplicates_count_twice(heads, kv_dtype):
    case = cases.make_case(4, heads, kv_dtype, 256)
    case.indices[:, 128:] = case.indices[:, :128]
    case.indices[2] = case.indices[2, 0].item()
    cases.run_and_check(case)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "valid"),
    [(1, 1), (63, 63), (64, 64), (65, 65), (193, 193), (2048, 2048)]
    + [(2176, valid) for valid in (2051, 2044, 1, 0)]
    + [(8192, 8192)],
)
@every_shape
def test_top_k_widths(heads, kv_dtype, columns, valid):
    cases.run_and_check(cases.make_case(3, heads, kv_dtype, columns, valid=valid))


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
@every_shape
def test_token_counts(heads, kv_dtype, tokens):
    cases.run_and_check(cases.make_case(tokens, heads, kv_dtype, 200, valid=150))


@every_shape
def test_prefill(heads, kv_dtype):
    case = cases.make_case(4096, heads, kv_dtype, 2176, valid=2051, rows=65536)
    out, lse = cases.call(case)
    which = torch.cat((torch.arange(0, 4096, 97), torch.arange(4090, 4096))).to(out.device)
    cases.check(cases.some_tokens(case, which), out[which], lse[which])
    assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_more_than_2_to_31_output_elements(kv_dtype):
    _need_gigabytes(16)
    case = cases.make_case(70_000, 64, kv_dtype, 64)
    out, lse = cases.call(case)
    which = torch.cat((torch.arange(0, 70_000, 1999), torch.arange(69_990, 70_000))).to(out.device)
    cases.check(cases.some_tokens(case, which), out[which], lse[which])
    assert not lse.isnan().any()


@pytest.mark.parametrize(("kv_dtype", "rows"), [("bf16", 4_500_000), ("fp8", 8_800_000)])
def test_rows_beyond_4_gib_and_2_to_31_elements(kv_dtype, rows):
    _need_gigabytes(rows * 512 * (2 if kv_dtype == "bf16" else 1) / 2**30 + 1)
    small = cases.make_case(3, 16, kv_dtype, 300)
    pool = torch.empty(rows, 512, dtype=small.kv_rows.dtype, device=small.q.device)
    pool[-4096:] = small.kv_rows
    far = replace(small, kv_rows=pool, indices=small.indices + (rows - 4096))
    near, _ = cases.run_and_check(small)
    out, _ = cases.call(far)
    assert torch.equal(out, near)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [1, 4, 12, 24, 48, 96, 128])
def test_other_head_counts(heads, kv_dtype):
    case = cases.make_case(5, heads, kv_dtype, 200, valid=170)
    cases.run_and_check(case)
    cases.run_and_check(case, splits=3)


def _need_gigabytes(needed: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < needed:
        pytest.skip(f"needs {needed:.0f} GiB of free GPU memory, {free:.0f} are free")


# --- strides ---------------------------------------------------------------------------------------------------------


@every_shape
def test_strided_operands(heads, kv_dtype):
    case = cases.make_case(6, heads, kv_dtype, 200, valid=180)
    device = case.q.device
    q = torch.zeros(heads, 6, 544, dtype=torch.bfloat16, device=device)[:, :, 16:528].transpose(0, 1)
    q.copy_(case.q)
    pad = 48 if kv_dtype == "fp8" else 8
    kv_rows = torch.zeros(4096, 512 + pad, dtype=case.kv_rows.dtype, device=device)[:, :512]
    kv_rows.copy_(case.kv_rows)
    indices = torch.full((6, 333), 7, dtype=torch.int32, device=device)[:, 101:301]
    indices.copy_(case.indices)
    strided = replace(case, q=q, kv_rows=kv_rows, indices=indices)
    expected, expected_lse = cases.run_and_check(case)
    kernel = cases.load(case)
    for splits in (1, 4):
        room = torch.full((6, 2 * heads, 520), 3.0, dtype=torch.bfloat16, device=device)
        out = room[:, ::2, :512]
        lse = torch.full((6, heads + 3), 3.0, device=device)[:, :heads]
        kernel(
            *(q, kv_rows, indices, case.scale, out, cases.workspace_for(kernel, strided, splits)),
            **dict(k_scale=case.k_scale, lse=lse, splits=splits),
        )
        cases.check(case, out, lse)
        assert (room[:, 1::2] == 3).all() and (room[:, :, 512:] == 3).all(), "wrote between the rows of out"
        if splits == 1:
            assert torch.equal(out, cases.call(case, splits=1)[0])
    assert expected.shape == case.q.shape and not expected_lse.isnan().any()


def test_fp8_rows_may_come_as_uint8():
    case = cases.make_case(4, 16, "fp8", 100)
    out, _ = cases.call(case)
    as_bytes, _ = cases.call(replace(case, kv_rows=case.kv_rows.view(torch.uint8)))
    assert torch.equal(out, as_bytes)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["low", "high", "outlier", "equal"])
@every_shape
def test_extreme_logits(heads, kv_dtype, kind):
    case = cases.make_case(4, heads, kv_dtype, 512)
    q, rows = case.q.float(), case.kv_rows.float()
    if kind == "equal":
        rows[:] = rows[0]
    elif kind == "outlier":  # one row near the end of each index row that outweighs all before it
        rows[11] = 40.0
        q = q.abs()
        case.indices[case.indices == 11] = 12
        case.indices[:, 500] = 11
    else:  # whole numbers, so that every score is exact: what is tested is the softmax, not fp32's five digits
        q = (q * 2).round().clamp(-4, 4)
        rows = (rows * 2).round().clamp(-4, 4)
        rows[:, :64] = 8.0
        q[:, :, :64] = 2048.0 if kind == "high" else -2048.0
        k_scale = 1.0 if case.k_scale is None else case.k_scale.item()
        case = replace(case, scale=0.05 / k_scale)
    changed = replace(case, q=q.to(torch.bfloat16), kv_rows=rows.to(case.kv_rows.dtype))
    _, lse = cases.run_and_check(changed)
    bound = {"low": lse.max() < -5e4, "high": lse.min() > 1e4}
    assert bound.get(kind, True)
    cases.run_and_check(changed, splits=3)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_fp8_codes(heads):
    """Codes at the ends of e4m3: 448 and -448, the subnormals, both zeros."""
    case = cases.make_case(4, heads, "fp8", 300)
    codes = case.kv_rows.view(torch.uint8).clone()
    special = torch.tensor([0x7E, 0xFE, 0x01, 0x81, 0x07, 0x87, 0x00, 0x80], dtype=torch.uint8, device=codes.device)
    codes[:, ::7] = special[torch.arange(codes[:, ::7].numel(), device=codes.device) % 8].view(codes.shape[0], -1)
    case = replace(case, kv_rows=codes.view(torch.float8_e4m3fn), q=(case.q.float() / 64).to(torch.bfloat16))
    cases.run_and_check(case)
    only_small = replace(case, kv_rows=(codes & 0x87).view(torch.float8_e4m3fn), q=case.q * 4096)
    cases.run_and_check(only_small)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize("heads", [8, 64])
def test_fp8_queries_of_any_magnitude(heads, magnitude):
    """Q goes to f16 with a factor of its own per token and head; heads of one token differ by many orders here."""
    case = cases.make_case(3, heads, "fp8", 300)
    spread = torch.logspace(-3, 3, heads, device=case.q.device)[None, :, None]
    q = (case.q.float() * magnitude * spread).to(torch.bfloat16)
    cases.run_and_check(replace(case, q=q, scale=cases.SCALE / magnitude / 1000))


@every_shape
def test_scale_and_k_scale_are_applied(heads, kv_dtype):
    case = replace(cases.make_case(4, heads, kv_dtype, 200), scale=0.1)
    cases.run_and_check(case)
    if kv_dtype == "fp8":
        plain = replace(case, k_scale=None)
        out, lse = cases.call(plain)
        cases.check(plain, out, lse)
