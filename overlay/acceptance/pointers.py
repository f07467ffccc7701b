"""What a failure points to: symptom -> what is known to cause it, likeliest first.

Where nothing is established, the text says so: a wrong cause costs more than none.
"""

POINTERS = {
    "unhealthy": (
        "The engine died or is still booting. `python -m overlay doctor --log FILE` names the failure lines it knows."
    ),
    "refused": "Nothing listens there, or the server went away. Its own log says why it ended.",
    "http": "The server refused or broke the request; its message is above and its log has the traceback.",
    "malformed": "Not an OpenAI API as vLLM serves it: check --url, and any proxy between.",
    "dropped": (
        "The stream ended early, as it does when an engine dies. The last worker line of the log tells: an illegal "
        "address in a prefill of more than 25K tokens is indexer_bounds, the end at 230K on GB10 is indexer_workspace, "
        "the end past 24K tokens of decode is indexer_topk."
    ),
    "hang": (
        "No token came. Workers at over 150 % CPU are compiling or autotuning, idle ones hang (`python -m overlay "
        "doctor` tells which). A FlashInfer autotune cache from an earlier boot can deadlock the next one at TP > 1: "
        "--no-enable-flashinfer-autotune. For slow prefills there is --patience."
    ),
    "repeated": (
        "One unit repeated is what uninitialised expert scales (nvfp4_moe_scales; `python -m overlay audit DIR`) and a "
        "broken attention path (sparse_mla; the log names the backend) both look like, and curing one of two changes "
        "nothing. At 64 to 256 rows only: FlashInfer older than 0.6.18 on its FA2 path (flashinfer_fa2)."
    ),
    "rows": (
        "If only some lengths fail: FlashInfer older than 0.6.18 gives NaN for batches of 64 to 256 rows "
        "(flashinfer_fa2). If all do: the weights, their quantisation or the expert scales."
    ),
    "needle": (
        "Context is lost: garbage pool ids (indexer_bounds), index rows cut short (rope_pad), or a linear-attention "
        "state rounded to bf16 in long prefills (vllm-project/vllm#58846: --additional-config "
        '\'{"kda_prefill_backend": "triton"}\'). --kv-cache-dtype bfloat16 takes the KV quantisation out.'
    ),
    "decode": (
        "Generation ended early. Past 24K tokens on GB10, persistent_topk wants more shared memory or more "
        "multiprocessors than there are (indexer_topk)."
    ),
    "batch": (
        "An answer changes beyond rounding with what runs beside it: FlashInfer older than 0.6.18 at 64 to 256 rows "
        "(flashinfer_fa2), or one expert's scale that poisons a whole batch (nvfp4_moe_scales, some_bad)."
    ),
    "echo": (
        "Rows of one batch are exchanged; no cause is known. Keep the log and the JSON, and see whether it stays with "
        "--enforce-eager and without speculative decoding."
    ),
    "prefix": (
        "Cached rows differ from computed ones: a compiled artifact of another patch set (compile_cache), or the KV "
        "cache itself. Does it stay with --no-enable-prefix-caching?"
    ),
    "replacement": (
        "Seen with some ModelOpt builds (vllm-project/vllm#54150); the cause is not known. Another build of the "
        "checkpoint tells whether it is the checkpoint."
    ),
}
