"""The boxes: what to type on each for LibertAIDAI/GLM-5.3-Flash-NVFP4, and why."""

from overlay.recipes import reports
from overlay.recipes.declare import RELEASES, Recipe, RecipeError, Release, Setting, dotted

MODEL = "LibertAIDAI/GLM-5.3-Flash-NVFP4"

OVERLAY_PATH = Setting(
    "PYTHONPATH=/opt/overlay",
    "the overlay's checkout or bundle, absolute; every process of the engine must inherit it",
)
BREAKABLE_OFF = Setting(
    "VLLM_USE_BREAKABLE_CUDAGRAPH=0",
    "breakable CUDA graphs cost up to 4.6 times of the KV cache on GB10 for no speed; a FULL-type mode is enough",
    before=(0, 33),
)
FULL_GRAPHS = Setting(
    """--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""",
    "decode in full CUDA graphs, prefill without; from 0.33 on, turning breakable graphs off needs a FULL-type mode",
    since=(0, 33),
)
INDEXER_LOGITS = Setting(
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=64",
    "vLLM's 512 kills a prefill of about 230K tokens on GB10 (vllm-project/vllm#55569); indexer_workspace sets it too",
)
FABRIC = (
    Setting("NCCL_SOCKET_IFNAME=$FABRIC", "the interface between the nodes, as `ip -br address` names it"),
    Setting("GLOO_SOCKET_IFNAME=$FABRIC", "the same for the processes' rendezvous"),
    Setting("VLLM_HOST_IP=$ADDRESS", "this node's address on that interface"),
)

OURS_030 = Setting(
    "--kv-cache-dtype fp8",
    "512-byte rows; on 0.30 the overlay's backend serves any KV dtype, vLLM's own cannot store rope-free rows at all",
    before=(0, 31),
)
OURS = Setting(
    "--kv-cache-dtype fp8",
    "selects the overlay's backend: 512-byte rows. `auto` leaves vLLM's own, with 656; bfloat16 also selects ours",
    since=(0, 31),
)
PARSERS = (
    Setting("--tool-call-parser glm47", "the model's tool call format"),
    Setting("--enable-auto-tool-choice", "tool calls without tool_choice in the request"),
    Setting("--reasoning-parser glm47", "separates thinking from the answer; thinking can be switched per request"),
)
NO_AUTOTUNE = Setting(
    "--no-enable-flashinfer-autotune",
    "saves up to an hour of silent boot, and a deadlock of the second boot at TP > 1 that its kept cache can cause",
)
TEXT_ONLY = Setting(
    "--language-model-only",
    "the image processor takes 15.7 GB of host memory in the API server; leave the flag out where images are needed",
)


def tensor_parallel(size: int) -> Setting:
    return Setting(f"--tensor-parallel-size {size}", f"{64 // size} of the 64 heads on each rank")


def draft(tokens: int, why: str) -> Setting:
    text = f"""--speculative-config '{{"method": "mtp", "num_speculative_tokens": {tokens}}}'"""
    return Setting(text, why)


MTP_GB10 = "drafting is what buys speed on a box that waits for memory: 14.5 to 24 tokens/s was reported with 3"
MTP_UNKNOWN = "3, as reported for two GB10; other boxes may like another number: `accept` measures it in minutes"

GB10_MEMORY = "as reported for one node; unified, so the system and the API server live in it too"

_RECIPES = (
    Recipe(
        name="gb10-x2",
        title="two GB10 (DGX Spark class), one per node",
        gpus=2,
        nodes=2,
        capability=(12, 1),
        memory=121.69,
        memory_source=GB10_MEMORY,
        utilization=0.85,
        environment=(OVERLAY_PATH, *FABRIC, BREAKABLE_OFF, INDEXER_LOGITS),
        flags=(
            tensor_parallel(2),
            OURS_030,
            OURS,
            Setting("--gpu-memory-utilization 0.85", "leaves 18 GiB of the node to the system; see the memory sum"),
            Setting("--max-model-len 262144", "served at this length by others; the model itself allows 1,048,576"),
            Setting(
                "--max-num-seqs 16", "this box serves few streams; each slot of linear-attention state costs memory"
            ),
            Setting("--max-num-batched-tokens 2048", "smaller activations and index buffers in the profile run"),
            FULL_GRAPHS,
            draft(3, MTP_GB10),
            *PARSERS,
            NO_AUTOTUNE,
            TEXT_ONLY,
        ),
        draft_tokens=3,
        reports=reports.GB10_PAIR,
        notes=(
            "While the weights load, the page cache fills the memory that the driver needs free (NV_ERR_NO_MEMORY with "
            "tens of GB available): run `python -m overlay flush-cache` on each node during the load.",
            "If vLLM prints a suggested --kv-cache-memory-bytes, take it verbatim: it was found to be what fits.",
            "Speed is bound by memory: CUDA graphs were worth 1 to 2 % here.",
        ),
    ),
    Recipe(
        name="gb10-x4",
        title="four GB10 (DGX Spark class), one per node",
        gpus=4,
        nodes=4,
        capability=(12, 1),
        memory=121.69,
        memory_source=GB10_MEMORY,
        utilization=0.8,
        environment=(OVERLAY_PATH, *FABRIC, BREAKABLE_OFF, INDEXER_LOGITS),
        flags=(
            tensor_parallel(4),
            OURS_030,
            OURS,
            Setting("--gpu-memory-utilization 0.8", "four nodes hold the weights easily; the rest is for the system"),
            Setting("--max-model-len 262144", "as on two nodes; the KV cache would hold the model's own 1,048,576"),
            Setting("--max-num-seqs 32", "there is memory for more streams than two nodes have"),
            Setting("--max-num-batched-tokens 4096", "prefill in larger steps than two nodes can afford"),
            FULL_GRAPHS,
            draft(4, "4, as in the only report for this box"),
            *PARSERS,
            NO_AUTOTUNE,
            TEXT_ONLY,
        ),
        draft_tokens=4,
        reports=reports.GB10_QUAD,
        notes=(
            "The memory ceiling of two nodes is gone: 45 GiB of weights on each rank.",
            "Every layer's all-reduce crosses the fabric; RDMA interfaces are named by NCCL_IB_HCA.",
        ),
    ),
    Recipe(
        name="rtx-pro-6000-x2",
        title="two RTX PRO 6000 Blackwell (96 GB), one machine",
        gpus=2,
        nodes=1,
        capability=(12, 0),
        memory=95.6,
        memory_source="97,887 MiB, as nvidia-smi shows",
        utilization=0.985,
        environment=(OVERLAY_PATH, BREAKABLE_OFF),
        flags=(
            tensor_parallel(2),
            OURS_030,
            OURS,
            Setting(
                "--gpu-memory-utilization 0.985",
                "89 GiB of weights leave nothing to give away: no display, nothing else on these cards",
            ),
            Setting("--max-model-len 32768", "what the memory sum allows with some room"),
            Setting("--max-num-seqs 4", "CUDA graphs, state slots and logits for four streams only"),
            Setting("--max-num-batched-tokens 1024", "the smallest activations that still prefill at a useful rate"),
            FULL_GRAPHS,
            *PARSERS,
            NO_AUTOTUNE,
            TEXT_ONLY,
        ),
        draft_tokens=0,
        reports=(),
        notes=(
            "The tightest box. Drafting is left out because it does not fit: its layer takes 2 GiB of each card, and "
            "with it vLLM's own plan has nothing left for the KV cache.",
            "prefill_profile matters here: the 2.3 GB that vLLM sets aside for a dense prefill that never runs is as "
            "much as the whole cache.",
        ),
    ),
    Recipe(
        name="rtx-pro-6000-x4",
        title="four RTX PRO 6000 Blackwell (96 GB), one machine",
        gpus=4,
        nodes=1,
        capability=(12, 0),
        memory=95.6,
        memory_source="97,887 MiB, as nvidia-smi shows",
        utilization=0.9,
        environment=(OVERLAY_PATH, BREAKABLE_OFF),
        flags=(
            tensor_parallel(4),
            OURS_030,
            OURS,
            Setting("--gpu-memory-utilization 0.9", "vLLM's usual share"),
            Setting("--max-model-len 262144", "as reported for this box"),
            Setting("--max-num-seqs 128", "the peak throughput was reported at 128 requests"),
            Setting("--max-num-batched-tokens 8192", "prefill in large steps; there is memory for it"),
            FULL_GRAPHS,
            draft(3, MTP_UNKNOWN),
            *PARSERS,
            NO_AUTOTUNE,
        ),
        draft_tokens=3,
        reports=reports.RTX_PRO_QUAD,
        notes=(
            "Bound by the latency of 45 layers of all-reduce over PCIe: CUDA graphs are decisive here (a factor of six "
            "was reported) where they are noise on GB10. Do not copy settings between the two.",
        ),
    ),
    Recipe(
        name="rtx-5090-x8",
        title="eight RTX 5090 (32 GB), one machine",
        gpus=8,
        nodes=1,
        capability=(12, 0),
        memory=31.84,
        memory_source="32,607 MiB, as nvidia-smi shows",
        utilization=0.92,
        environment=(OVERLAY_PATH, BREAKABLE_OFF),
        flags=(
            tensor_parallel(8),
            OURS_030,
            OURS,
            Setting("--gpu-memory-utilization 0.92", "23 GiB of weights in 31.84; see the memory sum"),
            Setting("--max-model-len 131072", "what the memory sum allows with room for several streams"),
            Setting("--max-num-seqs 16", "each slot of linear-attention state costs memory on every card"),
            Setting("--max-num-batched-tokens 2048", "small activations"),
            FULL_GRAPHS,
            draft(3, MTP_UNKNOWN),
            *PARSERS,
            NO_AUTOTUNE,
            TEXT_ONLY,
        ),
        draft_tokens=3,
        reports=(),
        notes=(
            "8 heads on each rank: every rank gathers the same rows for an eighth of the heads, so the kernel waits "
            "for memory and not for tensor cores. That is the price of TP 8.",
            "Livelocks of RTX 5090 boxes are reported (vllm-project/vllm#51921); their cause is open and no patch here "
            "claims to cure them.",
        ),
    ),
)

RECIPES = {recipe.name: recipe for recipe in _RECIPES}

# (vLLM, KV dtype asked for, backend)
TAKEOVER = (
    ("0.30", "any it supports", "ours"),
    (
        "0.31 and newer",
        "auto, fp8_ds_mla",
        "vLLM's own; `[patches.sparse_mla] enabled = true` adds auto, with bf16 rows",
    ),
    ("0.31 and newer", "bfloat16, fp8, fp8_e4m3", "ours"),
    ("0.31 and newer", "auto with DCP, another index_topk than 2048, or no usable FlashInfer", "ours, with bf16 rows"),
    ("any", "any, with --attention-backend naming another", "never ours"),
)


def find(name: str) -> Recipe:
    """A recipe by name; RecipeError with the nearest one."""
    from overlay.config import nearest

    if name not in RECIPES:
        raise RecipeError(f"{name!r} is not a recipe{nearest(name, RECIPES)}")
    return RECIPES[name]


def parse_release(text: str) -> Release:
    """`"0.33.0"` or `"0.33"` -> (0, 33). Raises RecipeError outside of what the recipes were checked for."""
    parts = text.split(".")
    release = tuple(int(part) for part in parts[:2]) if all(part.isdigit() for part in parts[:2]) else ()
    if release not in RELEASES:
        known = ", ".join(map(dotted, RELEASES))
        raise RecipeError(f"there are recipes for vLLM {known}, not for {text}; --vllm picks one")
    return release
