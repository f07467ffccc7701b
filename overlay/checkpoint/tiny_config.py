"""Configuration files of a tiny glm5_next checkpoint: the attention geometry of GLM-5.3-Flash, the rest small.

What attention kernels and vLLM's planner look at keeps its true value: rope-free MLA with 512-wide latent rows and
256-wide heads, index rows of 2048 tokens in pools of 4 with 32 index heads, linear attention with 128-wide heads,
four hyper-connected residual streams. Hidden size, depth and the experts are what makes it tiny.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay.errors import OverlayError

HEAD_COUNTS = (8, 16, 32, 64)  # what one rank of the 64-head model can hold at TP 8, 4, 2 and 1
LAYERS_PER_BLOCK = 4  # three linear-attention layers, then one sparse-MLA layer

# Token ids. A byte is its own id; the special tokens follow.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)
TOKEN_IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
END_OF_TEXT = TOKEN_IDS["<|endoftext|>"]
LONGEST_CONTEXT = 131072
VOCABULARY = 320  # divisible by 64, so that eight ranks can share it


class CheckpointError(OverlayError):
    """A checkpoint that cannot be written (or read) as asked."""


@dataclass(frozen=True)
class TinyModel:
    """Shape of one tiny model. Raises CheckpointError for a shape that the model family or vLLM rules out."""

    heads: int = 16
    layers: int = 4
    nested: bool = False  # Glm5NextForConditionalGeneration with a vision tower; else the flat Glm5NextForCausalLM
    mtp: bool = False
    seed: int = 0

    hidden: int = field(default=1024, init=False)
    q_lora: int = field(default=512, init=False)
    kv_lora: int = field(default=512, init=False)
    head_dim: int = field(default=256, init=False)  # of query, key and value of the sparse-MLA layers
    index_heads: int = field(default=32, init=False)
    index_dim: int = field(default=128, init=False)
    index_pool: int = field(default=4, init=False)
    linear_heads: int = field(default=8, init=False)  # divisible by every TP size up to 8
    linear_dim: int = field(default=128, init=False)
    conv_width: int = field(default=4, init=False)
    streams: int = field(default=4, init=False)
    dense_layers: int = field(default=1, init=False)
    dense_width: int = field(default=1024, init=False)
    experts: int = field(default=8, init=False)
    experts_per_token: int = field(default=2, init=False)
    expert_width: int = field(default=256, init=False)
    routed_scaling: float = field(default=2.5, init=False)

    def __post_init__(self) -> None:
        if self.heads not in HEAD_COUNTS:
            known = ", ".join(map(str, HEAD_COUNTS))
            raise CheckpointError(f"{self.heads} heads: this model family has {known} per rank; pass one of them")
        if self.layers < LAYERS_PER_BLOCK:
            raise CheckpointError(
                f"{self.layers} layers: the first sparse-MLA layer is number {LAYERS_PER_BLOCK}, so at least "
                f"{LAYERS_PER_BLOCK} are needed"
            )
        if not 0 <= self.seed < 2**32:
            raise CheckpointError(f"seed {self.seed} is outside 0 to {2**32 - 1}")

    def is_sparse_attention(self, layer: int) -> bool:
        """Whether `layer` attends by sparse MLA (else linear attention). The MTP layer, after the last, always does."""
        return layer >= self.layers or layer % LAYERS_PER_BLOCK == LAYERS_PER_BLOCK - 1

    def is_expert_layer(self, layer: int) -> bool:
        """Whether the feed-forward part of `layer` is a mixture of experts."""
        return layer >= self.dense_layers


def text_config(model: TinyModel) -> dict:
    """The text model's configuration, under the key names of the published one."""
    layers = range(model.layers)
    sparse = [i for i in layers if model.is_sparse_attention(i)]
    linear = [i for i in layers if not model.is_sparse_attention(i)]
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden,
        "intermediate_size": model.dense_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": LONGEST_CONTEXT,
        "tie_word_embeddings": False,
        "num_hidden_layers": model.layers,
        "num_nextn_predict_layers": int(model.mtp),
        "layer_types": [
            "deepseek_sparse_attention" if model.is_sparse_attention(i) else "linear_attention" for i in layers
        ],
        "mlp_layer_types": ["sparse" if model.is_expert_layer(i) else "dense" for i in layers],
        "first_k_dense_replace": model.dense_layers,
        # Sparse MLA without rope.
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.q_lora,
        "kv_lora_rank": model.kv_lora,
        "qk_nope_head_dim": model.head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": model.head_dim,
        "mla_use_nope": True,
        "attention_bias": False,
        # Its indexer.
        "index_n_heads": model.index_heads,
        "index_head_dim": model.index_dim,
        "index_topk": 2048,
        "index_kpool": model.index_pool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * model.layers,
        "indexer_rope_interleave": True,
        "linear_attn_config": {
            "num_heads": model.linear_heads,
            "head_dim": model.linear_dim,
            "short_conv_kernel_size": model.conv_width,
            "gate_lower_bound": -5.0,
            "kda_layers": linear,
            "full_attn_layers": sparse,
        },
        "mhc": True,
        "hc_mult": model.streams,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "n_shared_experts": 1,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": True,
        "routed_scaling_factor": model.routed_scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "swiglu_limit": 10.0,
        "pad_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT],
    }


def vision_config(model: TinyModel) -> dict:
    """A one-block vision tower. vLLM builds it unless it is told `--language-model-only`."""
    return {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 512,
        "num_heads": 8,
        "intermediate_size": 256,
        "projection_intermediate_size": 256,
        "out_hidden_size": model.hidden,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "image_size": 336,
        "hidden_act": "silu",
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
    }


def model_config(model: TinyModel) -> dict:
    """config.json, without a quantization_config."""
    if not model.nested:
        return {"architectures": ["Glm5NextForCausalLM"], **text_config(model)}
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text_config(model),
        "vision_config": vision_config(model),
        "image_token_id": TOKEN_IDS["<|image|>"],
        "video_token_id": TOKEN_IDS["<|video|>"],
        "image_start_token_id": TOKEN_IDS["<|begin_of_image|>"],
        "image_end_token_id": TOKEN_IDS["<|end_of_image|>"],
        "video_start_token_id": TOKEN_IDS["<|begin_of_video|>"],
        "video_end_token_id": TOKEN_IDS["<|end_of_video|>"],
    }


def generation_config() -> dict:
    """generation_config.json: greedy unless a request says otherwise, so that two engines can be compared."""
    return {"do_sample": False, "eos_token_id": [END_OF_TEXT], "pad_token_id": END_OF_TEXT}


def processor_config() -> dict:
    """processor_config.json: the image and video halves. Under any other file name the vision path does not load."""
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "patch_expand_factor": 1}
    return {
        "processor_class": "Glm5NextProcessor",
        "image_processor": {
            "image_processor_type": "Glm5NextImageProcessor",
            "min_image_tokens": 16,
            "max_image_tokens": 1024,
            **patches,
        },
        "video_processor": {
            "video_processor_type": "Glm5NextVideoProcessor",
            "min_image_tokens": 16,
            "max_image_tokens": 1024,
            **patches,
        },
    }
