"""Seeded random weights of a tiny glm5_next model, scaled so that every part of it shows in the logits.

vLLM's dummy weights are uniform in +-1e-3: every block then adds nothing to the residual stream, and an engine whose
attention returns zeros gives the same tokens. Here each block adds about as much as the embedding put there, attention
weights are concentrated on a few tokens (so that a lost or wrong index row shows), and every norm, bias and gate
differs from its neutral value.

A few channels of the residual stream are written by the embedding only (the matching rows of every output projection
are zero), and so reach each layer unchanged:

* channel 0 is constant. The output head uses it to hold down every token that is not printable ASCII: text stays
  readable, and a generation ends at its token limit, never by chance.
* one channel per expert tells for each token which experts it goes to. The routers read them with a gain that no
  rounding error overturns, and the rest of the stream with a small one. So two engines that differ by bf16 noise
  route alike, while the expert weights still depend on the context; and each token needs 2 experts of 8, so a dead
  expert spoils some tokens and leaves others right.

Values come from NumPy's PCG64 with one stream per tensor name, so the same seed gives the same bits on any machine, and
a model with another head count or an MTP layer shares every tensor whose shape it does not change.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Iterator

import numpy as np
import torch

from overlay.checkpoint.tiny_config import VOCABULARY, TinyModel, vision_config

# Standard deviation of an attention logit across the context: 2048 Gaussian logits with 2.5 put half of the weight on
# about four of them.
ATTENTION_SPREAD = 2.5
# One head of four looks for its own token: its keys resemble its queries by the square of this. Without it, indices
# that are off by one, or rows that lost the newest tokens, show on one token of fourteen; with it, on two of three.
SELF_HEADS = 4
SELF_RESEMBLANCE = 0.5
# What a block adds to the stream, relative to the embedding's 1.
SPARSE_ATTENTION_GAIN = 3.0
LINEAR_ATTENTION_GAIN = 1.5
DENSE_GAIN = 1.5
EXPERT_GAIN = 1.0
MTP_GAIN = 0.4  # the draft layer's blocks: small, so that it often agrees with the target
ROUTER_GAIN = 4.0
ROUTER_CONTEXT = 0.25  # with 0.5 a few tokens in 28,952 met a tie of two experts, and jumped
LOGIT_SPREAD = 0.75  # the best logit stays below 4, where BF16 logits are 1/64 apart
EMBEDDING_SHARE = 0.35  # of the final hidden state's root mean square that the last token's embedding has
SUCCESSOR_PULL = 1.75  # in logits; a token's own repetition is held back by as much
HELD_DOWN = 96.0
PRINTABLE = sorted({*string.ascii_letters.encode(), *string.digits.encode(), *string.punctuation.encode(), *b" \n"})

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def weights(model: TinyModel) -> NamedTensors:
    """Every tensor of the checkpoint under the name that vLLM's loaders (and transformers) read.

    BF16, except the tensors that vLLM keeps in fp32: hyper-connections, convolutions, decay parameters and the
    indexer's norm and pool position bias.
    """
    draw = Draw(model.seed)
    text, head = ("model.language_model.", "lm_head.") if model.nested else ("model.", "lm_head.")
    embedding = embed(draw, model)
    yield text + "embed_tokens.weight", embedding
    for layer in range(model.layers):
        yield from prefixed(f"{text}layers.{layer}.", decoder_layer(draw, model, layer))
    yield text + "norm.weight", draw.norm("norm", model.hidden)
    yield head + "weight", output_head(draw, model, embedding)
    if model.mtp:
        yield from prefixed(f"{text}layers.{model.layers}.", mtp_layer(draw, model, embedding))
    if model.nested:
        yield from prefixed("model.visual.", vision_tower(draw, vision_config(model)))


def prefixed(prefix: str, tensors: NamedTensors) -> NamedTensors:
    return ((prefix + name, tensor) for name, tensor in tensors)


class Draw:
    """Random tensors, each from a stream of its own that depends on the seed and the tensor's name alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        """fp32, Gaussian."""
        values = self.stream(name).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values).mul_(std).add_(mean)

    def uniform(self, name: str, *shape: int, low: float, high: float) -> torch.Tensor:
        """fp32, uniform."""
        return torch.from_numpy(self.stream(name).uniform(low, high, shape).astype(np.float32))

    def linear(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """BF16 [outputs, inputs]: inputs of mean square 1 give outputs of root mean square `gain`."""
        return self.normal(name, outputs, inputs, std=gain * inputs**-0.5).bfloat16()

    def norm(self, name: str, width: int) -> torch.Tensor:
        """BF16 norm weights around 1."""
        return self.normal(name, width, std=0.1, mean=1.0).bfloat16()


def reserved_channels(model: TinyModel) -> int:
    """How many leading channels of the residual stream only the embedding writes."""
    return 1 + model.experts


def writer(tensor: torch.Tensor, model: TinyModel) -> torch.Tensor:
    """An output projection [hidden, ...] made to leave the reserved channels alone."""
    tensor[: reserved_channels(model)] = 0
    return tensor


def expert_pair(token: int, model: TinyModel) -> tuple[int, int]:
    """The two experts `token` goes to in layer 0's numbering; layer L shifts both by L."""
    first = token % model.experts
    return first, (first + 1 + token // model.experts % (model.experts - 1)) % model.experts


def embed(draw: Draw, model: TinyModel) -> torch.Tensor:
    """BF16 [vocabulary, hidden]: unit Gaussian with the reserved channels filled in."""
    table = draw.normal("embed", VOCABULARY, model.hidden)
    table[:, 0] = 1.0
    table[:, 1 : reserved_channels(model)] = -1.0
    for token in range(VOCABULARY):
        for expert in expert_pair(token, model):
            table[token, 1 + expert] = 1.0
    return table.bfloat16()


def output_head(draw: Draw, model: TinyModel, embedding: torch.Tensor) -> torch.Tensor:
    """BF16 [vocabulary, hidden]. Only printable ASCII and the newline can win.

    Each of those has a successor in one random cycle through all of them: the last token's embedding favours that
    one and disfavours itself. Without it a greedy generation soon repeats one token; with it the draft layer, too,
    has something to get right.
    """
    head = draw.normal("head", VOCABULARY, model.hidden, std=LOGIT_SPREAD * model.hidden**-0.5)
    cycle = draw.stream("cycle").permutation(PRINTABLE)
    for token, successor in zip(cycle, np.roll(cycle, -1), strict=True):
        pull = SUCCESSOR_PULL / EMBEDDING_SHARE / model.hidden * embedding[token].float()
        head[successor] += pull
        head[token] -= pull
    head[:, : reserved_channels(model)] = 0
    head[[token for token in range(VOCABULARY) if token not in PRINTABLE], 0] = -HELD_DOWN
    return head.bfloat16()


def decoder_layer(draw: Draw, model: TinyModel, layer: int, gain: float = 1.0, streams: bool = True) -> NamedTensors:
    """One decoder layer; `gain` scales what its blocks add, `streams` says whether it is hyper-connected."""
    key = f"layer{layer}."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", draw.norm(key + norm, model.hidden)
    if streams:
        for block in ("attn", "ffn"):
            yield from hyper_connection(draw, model, key + block, f"hc_{block}_")
    attention = sparse_attention if model.is_sparse_attention(layer) else linear_attention
    yield from prefixed("self_attn.", attention(draw, model, key + "attn.", gain))
    if model.is_expert_layer(layer):
        yield from prefixed("mlp.", expert_mixture(draw, model, layer, key + "moe.", gain))
    else:
        yield from prefixed("mlp.", feed_forward(draw, model, key + "mlp.", model.dense_width, gain * DENSE_GAIN))


def hyper_connection(draw: Draw, model: TinyModel, key: str, prefix: str) -> NamedTensors:
    """The maps of one hyper-connection: what each stream gives to the block (n), gets from it (n), and the n x n mix.

    The mix starts near the identity, so that streams stay apart; the dynamic part is half as large as the fixed one.
    """
    n = model.streams
    base = draw.normal(key + "base", (2 + n) * n)
    base[2 * n :] *= 0.5
    base[2 * n :] += 2.0 * torch.eye(n).flatten()
    yield prefix + "fn", draw.normal(key + "fn", (2 + n) * n, n * model.hidden, std=0.5 * (n * model.hidden) ** -0.5)
    yield prefix + "base", base
    yield prefix + "scale", draw.uniform(key + "scale", 3, low=0.8, high=1.2)


def sparse_attention(draw: Draw, model: TinyModel, key: str, gain: float) -> NamedTensors:
    """Rope-free MLA with its indexer. Query and key of a head give logits of spread ATTENTION_SPREAD."""
    rows = model.heads * model.head_dim
    q_a = draw.linear(key + "q_a", model.q_lora, model.hidden)
    q_b = draw.linear(key + "q_b", rows, model.q_lora)
    kv_b = draw.linear(key + "kv_b", 2 * rows, model.kv_lora)
    keys = kv_b.view(model.heads, 2, model.head_dim, model.kv_lora)[::SELF_HEADS, 0]
    keys.copy_(resembling(keys, q_b.view(model.heads, model.head_dim, model.q_lora)[::SELF_HEADS]))
    yield "q_a_proj.weight", q_a
    yield "q_a_layernorm.weight", draw.norm(key + "q_a_norm", model.q_lora)
    yield "q_b_proj.weight", q_b * ATTENTION_SPREAD
    yield "kv_a_proj_with_mqa.weight", resembling(draw.linear(key + "kv_a", model.kv_lora, model.hidden), q_a)
    yield "kv_a_layernorm.weight", draw.norm(key + "kv_a_norm", model.kv_lora)
    yield "kv_b_proj.weight", kv_b
    output = draw.linear(key + "o", model.hidden, rows, gain * SPARSE_ATTENTION_GAIN)
    yield "o_proj.weight", writer(output, model)

    index = "indexer."
    yield index + "wq_b.weight", draw.linear(key + "wq_b", model.index_heads * model.index_dim, model.q_lora)
    yield index + "wk.weight", draw.linear(key + "wk", model.index_dim, model.hidden)
    yield index + "k_norm.weight", draw.normal(key + "k_norm", model.index_dim, std=0.1, mean=1.0)
    yield index + "k_norm.bias", draw.normal(key + "k_norm_bias", model.index_dim, std=0.1)
    yield index + "weights_proj.weight", draw.linear(key + "weights_proj", model.index_heads, model.hidden)
    yield index + "index_kpool_compress_ape", draw.normal(key + "ape", model.index_pool, model.index_dim)
    yield index + "index_kpool_compress_gate", draw.linear(key + "pool_gate", model.index_dim, model.hidden)


def resembling(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with a part of `other` in it; of the same spread as both."""
    return tensor * (1 - SELF_RESEMBLANCE**2) ** 0.5 + other * SELF_RESEMBLANCE


def linear_attention(draw: Draw, model: TinyModel, key: str, gain: float) -> NamedTensors:
    """Kimi delta attention. The decay biases give channel memories from about 3 to about 300 tokens."""
    width = model.linear_heads * model.linear_dim
    for part in "qkv":
        yield f"{part}_proj.weight", draw.linear(key + part, width, model.hidden)
    for part in "qkv":
        yield f"{part}_conv1d.weight", draw.normal(key + part + "_conv", width, 1, model.conv_width, std=0.5)
    yield "b_proj.weight", draw.linear(key + "b", model.linear_heads, model.hidden)
    for part in "fg":
        yield f"{part}_a_proj.weight", draw.linear(key + part + "_a", model.linear_dim, model.hidden)
        yield f"{part}_b_proj.weight", draw.linear(key + part + "_b", width, model.linear_dim)
    yield "dt_bias", draw.uniform(key + "dt", width, low=-7.0, high=-3.0)
    yield "A_log", draw.uniform(key + "A", model.linear_heads, low=-0.2, high=0.2)
    yield "o_norm.weight", draw.norm(key + "o_norm", model.linear_dim)
    yield "o_proj.weight", writer(draw.linear(key + "o", model.hidden, width, gain * LINEAR_ATTENTION_GAIN), model)


def feed_forward(draw: Draw, model: TinyModel, key: str, width: int, gain: float) -> NamedTensors:
    """A SwiGLU block; SiLU(gate) * up of unit Gaussians has root mean square 0.6."""
    yield "gate_proj.weight", draw.linear(key + "gate", width, model.hidden)
    yield "up_proj.weight", draw.linear(key + "up", width, model.hidden)
    yield "down_proj.weight", writer(draw.linear(key + "down", model.hidden, width, gain), model)


def expert_mixture(draw: Draw, model: TinyModel, layer: int, key: str, gain: float) -> NamedTensors:
    """Router, shared expert and routed experts. The router reads the reserved channels, shifted by the layer."""
    router = draw.normal(key + "router", model.experts, model.hidden, std=ROUTER_CONTEXT * model.hidden**-0.5)
    router[:, : reserved_channels(model)] = 0
    for expert in range(model.experts):
        router[(expert + layer) % model.experts, 1 + expert] = ROUTER_GAIN
    yield "gate.weight", router.bfloat16()
    yield "gate.e_score_correction_bias", draw.normal(key + "correction", model.experts, std=0.02)
    gain *= EXPERT_GAIN
    yield from prefixed("shared_experts.", feed_forward(draw, model, key + "shared.", model.expert_width, gain))
    for expert in range(model.experts):
        block = feed_forward(draw, model, f"{key}{expert}.", model.expert_width, gain)
        yield from prefixed(f"experts.{expert}.", block)


def mtp_layer(draw: Draw, model: TinyModel, embedding: torch.Tensor) -> NamedTensors:
    """The draft layer: it passes the embedding on and adds little, so it often drafts what the target will say."""
    projection = torch.zeros(model.hidden, 2 * model.hidden)
    projection[:, : model.hidden] = torch.eye(model.hidden)
    projection[:, model.hidden :] = draw.normal("mtp.eh", model.hidden, model.hidden, std=0.3 * model.hidden**-0.5)
    projection[: reserved_channels(model), model.hidden :] = 0
    yield "embed_tokens.weight", embedding.clone()
    yield "enorm.weight", draw.norm("mtp.enorm", model.hidden)
    yield "hnorm.weight", draw.norm("mtp.hnorm", model.hidden)
    yield "eh_proj.weight", projection.bfloat16()
    yield "shared_head.norm.weight", draw.norm("norm", model.hidden)  # the target's own final norm
    yield from decoder_layer(draw, model, model.layers, gain=MTP_GAIN, streams=False)


def vision_tower(draw: Draw, config: dict) -> NamedTensors:
    """The vision tower's tensors; `config` is its part of config.json."""
    width, merged = config["hidden_size"], config["out_hidden_size"]
    frames, patch, merge = config["temporal_patch_size"], config["patch_size"], config["spatial_merge_size"]
    key = "vision."

    def affine(name: str, outputs: int, inputs: int) -> NamedTensors:
        yield f"{name}.weight", draw.linear(key + name, outputs, inputs)
        yield f"{name}.bias", draw.normal(key + name + "_bias", outputs, std=0.1).bfloat16()

    pixels = config["in_channels"] * frames * patch * patch
    for name, tensor in affine("patch_embed.proj", width, pixels):
        shape = (width, config["in_channels"], frames, patch, patch)
        yield name, tensor.view(shape) if name.endswith("weight") else tensor
    for block in range(config["depth"]):
        part = f"blocks.{block}."
        for norm in ("norm1", "norm2"):
            yield f"{part}{norm}.weight", draw.norm(key + part + norm, width)
        for norm in ("q_norm", "k_norm"):
            yield f"{part}attn.{norm}.weight", draw.norm(key + part + norm, width // config["num_heads"])
        yield from affine(part + "attn.qkv", 3 * width, width)
        yield from affine(part + "attn.proj", width, width)
        yield from affine(part + "mlp.gate_proj", config["intermediate_size"], width)
        yield from affine(part + "mlp.up_proj", config["intermediate_size"], width)
        yield from affine(part + "mlp.down_proj", width, config["intermediate_size"])
    yield "post_layernorm.weight", draw.norm(key + "post", width)
    for name, tensor in affine("downsample", merged, width * merge * merge):
        yield name, tensor.view(merged, width, merge, merge) if name.endswith("weight") else tensor
    bottleneck = config["projection_intermediate_size"]
    yield "merger.proj.weight", draw.linear(key + "merger", merged, merged)
    yield "merger.post_projection_norm.weight", draw.norm(key + "merger_norm", merged)
    yield "merger.post_projection_norm.bias", draw.normal(key + "merger_norm_bias", merged, std=0.1).bfloat16()
    yield "merger.gate_proj.weight", draw.linear(key + "merger_gate", bottleneck, merged)
    yield "merger.up_proj.weight", draw.linear(key + "merger_up", bottleneck, merged)
    yield "merger.down_proj.weight", draw.linear(key + "merger_down", merged, bottleneck)
