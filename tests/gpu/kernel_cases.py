"""Inputs, a call and the accuracy bars for the kernel tests; needs torch, CuPy and a GPU, not vLLM."""

from dataclasses import dataclass, replace

import torch

from overlay.kernel.launch import SparseMLA
from overlay.kernel.reference import sparse_mla_reference
from overlay.kernel.variants import Variant, variants_for

LATENT = 512
SCALE = LATENT**-0.5
SHAPES = [(heads, kv_dtype) for kv_dtype in ("bf16", "fp8") for heads in (8, 16, 32, 64)]


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Case:
    """The inputs of one call; `k_scale` is None for bf16 rows."""

    q: torch.Tensor
    kv_rows: torch.Tensor
    indices: torch.Tensor
    k_scale: torch.Tensor | None = None
    scale: float = SCALE

    @property
    def kv_dtype(self) -> str:
        return "bf16" if self.kv_rows.dtype == torch.bfloat16 else "fp8"


def make_case(
    tokens: int, heads: int, kv_dtype: str, columns: int, *, valid: int | None = None, rows: int = 4096, seed: int = 0
) -> Case:
    """Normal data; `valid` of the columns name a row, the others, at random places, are -1."""
    device = gpu()
    generator = torch.Generator(device).manual_seed(seed * 7919 + tokens * 31 + heads + columns)
    q = torch.randn(tokens, heads, LATENT, generator=generator, device=device).to(torch.bfloat16)
    kv_rows = torch.randn(rows, LATENT, generator=generator, device=device)
    k_scale = None
    if kv_dtype == "fp8":
        k_scale = torch.tensor(0.37, device=device)
        kv_rows = (kv_rows / k_scale).to(torch.float8_e4m3fn)
    else:
        kv_rows = kv_rows.to(torch.bfloat16)
    indices = torch.randint(0, rows, (tokens, columns), generator=generator, device=device, dtype=torch.int32)
    if valid is not None:
        order = torch.rand(tokens, columns, generator=generator, device=device).argsort(dim=1)
        indices[order >= valid] = -1
    return Case(q, kv_rows, indices, k_scale)


def load(case: Case) -> SparseMLA:
    return SparseMLA.load(gpu(), case.q.shape[1], case.kv_dtype)


def workspace_for(
    kernel: SparseMLA, case: Case, splits: int | None = None, variant: Variant | None = None
) -> torch.Tensor:
    """A workspace full of NaN, as large as the call needs."""
    tokens, columns = case.indices.shape
    size = kernel.workspace_bytes(tokens, columns)
    if tokens and (splits or variant):
        size = max(size, kernel.plan(tokens, columns, splits, variant).partial_bytes(tokens))
    return torch.full((max(size, 16),), 255, dtype=torch.uint8, device=gpu())


def call(case: Case, splits: int | None = None, variant: Variant | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on poisoned outputs."""
    kernel = load(case)
    out = torch.full_like(case.q, torch.nan, memory_format=torch.contiguous_format)
    lse = torch.full(case.q.shape[:2], torch.nan, device=gpu())
    workspace = workspace_for(kernel, case, splits, variant)
    kernel(
        *(case.q, case.kv_rows, case.indices, case.scale, out, workspace),
        **dict(k_scale=case.k_scale, lse=lse, splits=splits, variant=variant),
    )
    torch.cuda.synchronize()
    return out, lse


def some_tokens(case: Case, which: torch.Tensor | slice) -> Case:
    return replace(case, q=case.q[which], indices=case.indices[which])


def check(case: Case, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Every element of `out` and `lse` within the bars of the contract, against fp64."""
    k_scale = 1.0 if case.k_scale is None else case.k_scale.double()
    reference, reference_lse = sparse_mla_reference(case.q, case.kv_rows, case.indices, case.scale, k_scale)
    got = out.double()
    assert not got.isnan().any(), f"{int(got.isnan().sum())} NaN, the first at {got.isnan().nonzero()[0].tolist()}"
    empty = reference_lse.isneginf()
    assert (got[empty] == 0).all(), "a token without a valid index must give exact zeros"
    if out.numel() == 0:
        return
    error = got - reference
    norm = reference.norm()
    if norm > 0:
        relative = (error.norm() / norm).item()
        assert relative <= 3e-3, f"relative error {relative:.2e}"
        live, live_reference = got[~empty], reference[~empty]
        cosine = torch.nn.functional.cosine_similarity(live, live_reference, dim=-1).min().item()
        assert cosine >= 0.999995, f"cosine {cosine:.7f}"
    index = case.indices.long()
    named = index[(index >= 0) & (index < case.kv_rows.shape[0])].unique()
    rows = case.kv_rows.view(torch.float8_e4m3fn) if case.kv_rows.dtype == torch.uint8 else case.kv_rows
    largest = (rows[named].double().abs().max() * k_scale) if named.numel() else 0.0
    excess = (error.abs() - 8e-4 * largest - 3.01 / 128 * reference.abs()).max().item()
    assert excess <= 0, f"an element is off by {excess:.2e} more than allowed"
    if lse is not None:
        assert torch.equal(lse.isneginf(), empty)
        off = (lse.double() - reference_lse)[~empty].abs() - 1e-5 - 1e-6 * reference_lse[~empty].abs()
        assert off.numel() == 0 or off.max() <= 0, f"lse is off by {off.max().item():.2e} more than allowed"


def run_and_check(
    case: Case, splits: int | None = None, variant: Variant | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As asked; a call of few tokens also by the variant that serves more of them."""
    out, lse = call(case, splits, variant)
    check(case, out, lse)
    if variant is None and len(case.indices) > 0:
        kernel = load(case)
        (chosen, *_), (usual, *_) = kernel.parts(*case.indices.shape), variants_for(kernel.num_heads, kernel.kv_dtype)
        if chosen.plan.variant.few:
            check(case, *call(case, splits, usual))
    return out, lse
