"""Figures that others published. None was measured again with this overlay, whose kernel is not theirs."""

from overlay.recipes.declare import Report

LIBERTAI = "LibertAI, the first authors"
LIBERTAI_WHEN = "undated; the model came out on 26 August 2026"
RELEASE_DAY = "26 August 2026, the day of the release"
NEXT_DAY = "27 August 2026"
SPARK_RECIPE = "a community recipe for two DGX Sparks"
SPARK_FORUM = "a post in NVIDIA's DGX Spark / GB10 forum"

GB10_PAIR = (
    Report("14.46 tokens/s", "one stream, no drafting; median of five", LIBERTAI, LIBERTAI_WHEN),
    Report("24.04 tokens/s", "one stream, MTP with 3 draft tokens; median of five", LIBERTAI, LIBERTAI_WHEN),
    Report("23.69 tokens/s", "the same with vLLM's default (breakable) CUDA graphs", LIBERTAI, LIBERTAI_WHEN),
    Report("24.38 tokens/s", "the same with breakable CUDA graphs off", LIBERTAI, LIBERTAI_WHEN),
    Report("KV cache 4.6 times smaller", "breakable CUDA graphs as vLLM enables them", LIBERTAI, LIBERTAI_WHEN),
    Report("88,790 tokens of KV cache", "65,536 tokens of context", LIBERTAI, LIBERTAI_WHEN),
    Report(
        "24.74 code, 30.30 structured, 19.58 prose tokens/s",
        "one stream, MTP with 5 draft tokens, rows padded to the packed layout; median of three",
        SPARK_RECIPE,
        NEXT_DAY,
    ),
    Report("14.6 tokens/s", "the same without drafting", SPARK_RECIPE, NEXT_DAY),
    Report(
        "21.8 tokens/s (peak 22.7), first token after 0.29 s",
        "one stream, MTP with 4 draft tokens, FlashInfer's FA2 route; median of three",
        SPARK_FORUM,
        RELEASE_DAY,
    ),
    Report(
        "507K tokens of KV cache",
        "262,144 tokens of context, fp8 KV",
        SPARK_FORUM,
        RELEASE_DAY,
    ),
)

GB10_QUAD = (
    Report("35.7 tokens/s", "one stream, TP 4, MTP", SPARK_FORUM, RELEASE_DAY),
    Report("1.26M tokens of KV cache", "TP 4, fp8 KV", SPARK_FORUM, RELEASE_DAY),
)

RTX_PRO_QUAD = (
    Report("129.8 tokens/s", "one stream, TP 4", LIBERTAI, LIBERTAI_WHEN),
    Report("1,691 tokens/s in sum", "128 requests at once", LIBERTAI, LIBERTAI_WHEN),
    Report("5.3 to 6.3 million tokens of KV cache", "262,144 tokens of context, fp8 KV", LIBERTAI, LIBERTAI_WHEN),
    Report("20 tokens/s without CUDA graphs, 120 with", "one stream, TP 4", LIBERTAI, LIBERTAI_WHEN),
)
