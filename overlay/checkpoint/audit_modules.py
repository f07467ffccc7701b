"""A checkpoint's tensors as modules: what each is, and how its weight is stored, told from names, dtypes and shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from overlay.checkpoint.audit_headers import Tensor

# Last components of tensor names that belong to a module; any other name is a bare parameter.
PARTS = {
    "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale",
    "weight_shape", "weight_zero_point", "input_scale", "input_scale_2", "input_global_scale", "bias",
    "k_scale", "v_scale",
}  # fmt: skip
# Scales of one number per module (or per expert, where experts are stacked): ModelOpt, compressed-tensors, Quark.
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
INPUT_SCALES = ("input_scale", "input_global_scale", "input_scale_2")
FLOATS = {"F64", "F32", "F16", "BF16"}

ROUTED, SHARED, DENSE, HEAD = "routed experts", "shared experts", "dense MLP", "output head"
ATTENTION, LINEAR_ATTENTION, MAMBA, INDEXER = "attention", "linear attention", "Mamba mixer", "indexer"
ROUTER, EMBEDDING, VISION, OTHER = "router", "embeddings", "vision", "norms and the rest"
MTP = "MTP layer"
KINDS = (
    ROUTED, SHARED, DENSE, ATTENTION, LINEAR_ATTENTION, MAMBA, INDEXER, ROUTER, EMBEDDING, HEAD, VISION, MTP, OTHER,
)  # fmt: skip

_BY_NAME = (
    (VISION, r"(^|\.)(visual|vision_tower|vision_model|vit_large_projector|multi_modal_projector|mm_projector)\."),
    (ROUTER, r"\.(gate|router|shared_expert_gate)(\.|$)|e_score_correction_bias"),
    (SHARED, r"\.(shared_experts?|share_expert)\."),  # Step-3.5 says share_expert
    (ROUTED, r"\.experts\.|\.moe\.(gate|up|down)_proj(\.|$)"),
    (EMBEDDING, r"(^|\.)(embed_tokens|embeddings|tok_embeddings|word_embeddings|position_embeddings|wte|wpe)(\.|$)"),
    (HEAD, r"(^|\.)(lm_head|shared_head\.head)(\.|$)"),
    (INDEXER, r"\.indexer\."),
    (LINEAR_ATTENTION, r"\.linear_attn\."),
    # Nemotron-H calls every layer's body "mixer": attention, MLP, experts or Mamba.
    (ATTENTION, r"\.(self_attn|attn|attention)\.|\.mixer\.(q|k|v|o|qkv)_proj(\.|$)"),
    (DENSE, r"\.(mlp|feed_forward|mixer)\.(gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)(\.|$)"),
    (MAMBA, r"\.(mixer|mamba)\.(in_proj|out_proj|conv1d|x_proj|dt_proj|norm|A_log|D|dt_bias)(\.|$)"),
)
# Layers or experts; a larger number in config.json is none, and a list of so many absent ones would fill the memory.
LARGEST_COUNT = 1 << 16
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Shape:
    """What config.json says of the model's extent; None where it says nothing."""

    layers: int | None
    mtp_layers: int
    experts: int | None
    linear_layers: frozenset[int]


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint with its tensors by part (`weight`, `input_scale` ...; "" for a bare parameter)."""

    name: str
    kind: str
    mtp: bool
    layer: int | None
    expert: int | None
    parts: Mapping[str, Tensor]

    @cached_property
    def weight(self) -> Tensor | None:
        return self.parts.get("weight_packed") or self.parts.get("weight") or self.parts.get("")

    @cached_property
    def format(self) -> str:
        """`nvfp4`, `mxfp4`, `fp8`, `mxfp8`, `int4`, `int8`, `plain` (a float type), or `packed`: bytes, no scale."""
        weight, scale = self.weight, self.parts.get("weight_scale")
        if weight is None or weight.dtype in FLOATS:
            return "plain"
        if weight.dtype in ("U8", "F4"):
            if self.scale(GLOBAL_SCALES) or (scale and scale.dtype == "F8_E4M3"):
                return "nvfp4"
            return "mxfp4" if scale else "packed"
        if weight.dtype == "F8_E4M3" and scale and scale.dtype in ("U8", "F8_E8M0"):  # powers of two
            return "mxfp8"
        return {"F8_E4M3": "fp8", "I32": "int4", "I8": "int8"}.get(weight.dtype, weight.dtype.lower())

    @cached_property
    def matrix(self) -> bool:
        """Is it a matrix that a linear layer multiplies by (two dimensions, or a stack of experts)?

        A bare parameter is none, unless it is a stack: a linear layer's is called `weight`.
        """
        stacked = self.kind == ROUTED
        bare = self.weight is self.parts.get("")
        return self.weight is not None and len(self.weight.shape) in ((2, 3) if stacked else () if bare else (2,))

    @cached_property
    def parameters(self) -> int:
        """Weights of the model: two a byte where they are packed; scales are no parameters."""
        per_element = {"nvfp4": 2, "mxfp4": 2, "packed": 2, "int4": 8}
        count = 0
        for part, tensor in self.parts.items():
            if part in ("weight", "weight_packed", "bias", ""):
                packed = tensor is self.weight and tensor.dtype != "F4"
                count += tensor.elements * (per_element.get(self.format, 1) if packed else 1)
        return count

    @cached_property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.parts.values())

    def scale(self, names: tuple[str, ...]) -> Tensor | None:
        """The first of the named scale tensors that the module has."""
        return next((self.parts[name] for name in names if name in self.parts), None)


def shape(config: Mapping) -> Shape:
    """Extent of the model from config.json; a nested text_config goes first."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config

    def number(*keys: str) -> int | None:
        counts = (text[key] for key in keys if type(text.get(key)) is int)
        return next((count for count in counts if 0 <= count <= LARGEST_COUNT), None)

    types = text.get("layer_types")
    linear = {i for i, kind in enumerate(types) if kind == "linear_attention"} if isinstance(types, list) else set()
    return Shape(
        layers=number("num_hidden_layers"),
        mtp_layers=number("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        experts=number("n_routed_experts", "num_local_experts", "num_experts"),
        linear_layers=frozenset(linear),
    )


def modules(tensors: Iterable[Tensor], extent: Shape) -> list[Module]:
    """The tensors grouped by module, in the order of their names."""
    parts: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        module, part = (module, part) if part in PARTS else (tensor.name, "")
        parts.setdefault(module, {})[part] = tensor
    return [_module(name, parts[name], extent) for name in sorted(parts)]


def _module(name: str, parts: Mapping[str, Tensor], extent: Shape) -> Module:
    layer = _number(_LAYER, name)
    kind = next((kind for kind, pattern in _BY_NAME if re.search(pattern, name + ".")), OTHER)
    if kind == VISION:
        layer = None
    mtp = name.startswith("mtp.") or ".mtp." in name
    mtp = mtp or (kind != VISION and layer is not None and extent.layers is not None and layer >= extent.layers)
    if kind == ATTENTION and layer in extent.linear_layers and not mtp:
        kind = LINEAR_ATTENTION
    return Module(name, kind, mtp, layer, _number(_EXPERT, name), parts)


def _number(pattern: re.Pattern, name: str) -> int | None:
    found = pattern.search(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Total:
    """One row of the totals: parameters and bytes of a kind of module, and its storage formats by parameters."""

    kind: str
    parameters: int
    bytes: int
    formats: Mapping[str, int]


def totals(found: Iterable[Module]) -> list[Total]:
    """Totals per kind, the MTP layer as one kind whatever it is made of."""
    rows: dict[str, list[Module]] = {}
    for module in found:
        rows.setdefault(MTP if module.mtp else module.kind, []).append(module)
    return [_total(kind, rows[kind]) for kind in KINDS if kind in rows]


def _total(kind: str, members: list[Module]) -> Total:
    formats: dict[str, int] = {}
    for module in members:
        stored = module.weight.dtype if module.format == "plain" and module.weight else module.format
        formats[stored] = formats.get(stored, 0) + module.parameters
    return Total(kind, sum(formats.values()), sum(module.bytes for module in members), formats)
