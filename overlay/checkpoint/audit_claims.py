"""What is wrong with the quantisation configurations themselves: unusable, contradictory or mislabelled."""

import re

from overlay.checkpoint.audit_config import ALGORITHMS, CONFIG, SIDE_FILE, QuantConfig, in_effect
from overlay.checkpoint.findings import Finding, error, some, warning

# vLLM's ModelOpt configuration classes insist on these in the side file's form (modelopt.py, _from_config).
SIDE_FILE_FIELDS = ("group_size", "kv_cache_quant_algo", "exclude_modules")


def findings(main: QuantConfig | None, side: QuantConfig | None) -> list[Finding]:
    """What is wrong with the configurations themselves."""
    used = in_effect(main, side)
    if used is None:
        return []
    return [*_unusable(used), *_self_contradiction(used), *_label(used), *_contradictions(main, side)]


def _unusable(config: QuantConfig) -> list[Finding]:
    """Configurations that vLLM refuses, or does not recognise as quantisation."""
    found = []
    if not config.recognised:
        found.append(
            error(
                "quant_method",
                f"{config.file} names no quantisation method (producer: {config.producer or 'none'})",
                "vLLM takes the checkpoint for unquantised and stops at the first packed weight",
                f'put "quant_method": "{config.method or "modelopt"}" at the top level of {config.file}',
            )
        )
    if config.nested and "NVFP4" in config.algorithm:
        missing = [field for field in SIDE_FILE_FIELDS if field not in config.body]
        if missing:
            found.append(
                error(
                    "side_file_fields",
                    f"{config.file} lacks {', '.join(missing)}",
                    "vLLM raises ValueError: NVFP4 quantization requires the following fields",
                    'add them below "quantization"; exclude_modules has to list what is stored unquantised',
                )
            )
    if config.nested and config.producer.startswith("modelopt") and config.algorithm in ("W4A16_NVFP4", "MXFP8"):
        found.append(
            error(
                "side_file_algorithm",
                f"{config.file} says {config.algorithm}",
                "vLLM raises ValueError: Unknown ModelOpt quant algo, in this file's form",
                f'put it into {CONFIG} as "quantization_config", with "quant_method": "modelopt"',
            )
        )
    if config.algorithm == "MIXED_PRECISION" and not config.layers:
        found.append(
            error(
                "mixed_without_layers",
                f"{config.file} says MIXED_PRECISION and has no quantized_layers",
                "vLLM raises ValueError: it cannot tell which module is quantised how",
                f"get {SIDE_FILE} of the same export, which has the map",
            )
        )
    patterns = [*config.exclude, *(target for group in config.groups for target in group.targets)]
    for pattern in patterns if config.method in ("compressed-tensors", "quark") else ():
        if pattern.startswith("re:") and (problem := _regex_problem(pattern[3:])):
            found.append(
                error(
                    "bad_pattern",
                    f"{config.file}: {pattern!r} is not a regular expression: {problem}",
                    "vLLM raises re.error when it builds the first layer",
                    "correct the pattern",
                )
            )
    unknown: dict[str, list[str]] = {}
    for name, scheme in config.layers.items():
        if not scheme.known:
            unknown.setdefault(scheme.weights, []).append(name)
    if config.algorithm and config.algorithm not in (*ALGORITHMS, "MIXED_PRECISION"):
        unknown[config.algorithm] = ["the whole checkpoint"]
    for name, modules in unknown.items():
        found.append(
            error(
                "unknown_algorithm",
                f"{some(modules)}: {name} is no algorithm that vLLM's ModelOpt support knows",
                "vLLM builds these modules unquantised and copies integers into them, or stops with a KeyError",
                "no patch helps: export these modules in FP8, NVFP4 or unquantised",
            )
        )
    return found


def _regex_problem(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as problem:
        return str(problem)
    return None


def _self_contradiction(config: QuantConfig) -> list[Finding]:
    """Groups that say one thing and the per-layer map another."""
    differ = {}
    for group in config.groups:
        for target in group.targets:
            listed = config.layers.get(target)
            if listed is not None and listed != group.scheme:
                differ.setdefault((str(group.scheme), str(listed)), []).append(target)
    return [
        warning(
            "groups_against_layers",
            f"{config.file}: config_groups says {group} for {len(targets)} modules ({targets[0]}, ...), "
            f"quantized_layers says {listed}",
            "the per-layer map wins in vLLM; activation scales that are stored all the same are read and discarded",
            "nothing to do; a newer export agrees with itself",
        )
        for (group, listed), targets in differ.items()
    ]


def _label(config: QuantConfig) -> list[Finding]:
    """NVFP4, which means W4A4 to vLLM, over groups of which some or all quantise weights alone."""
    if config.method != "modelopt" or config.algorithm != "NVFP4" or not config.groups:
        return []
    if not any(group.scheme.activations is None for group in config.groups):
        return []
    if config.promoted:
        consequence = "vLLM 0.27.1 and 0.28.0 serve it as W4A4 with uninitialised scales; 0.29 and later as W4A16"
    else:
        consequence = "vLLM up to 0.33.0 does not recognise this spelling and serves it as W4A4"
    how_many = "all groups" if config.weight_only else "some groups"
    return [
        warning(
            "label_nvfp4_is_weight_only",
            f"{config.file} is labelled NVFP4, and {how_many} of it quantise weights alone",
            consequence,
            "patch nvfp4_moe_scales (on by default) goes by the tensors",
        )
    ]


def _contradictions(main: QuantConfig | None, side: QuantConfig | None) -> list[Finding]:
    """config.json and hf_quant_config.json of one checkpoint, where they say different things."""
    if main is None or side is None:
        return []
    used = in_effect(main, side)
    found = []
    pairs = {
        "quant_algo": (main.algorithm, side.algorithm),
        "group_size": (main.body.get("group_size"), side.body.get("group_size")),
    }
    for key, (here, there) in pairs.items():
        if here and there and here != there:
            found.append(_contradiction(key, here, there, used, "export again"))
    for key, here, there in (
        ("exclusion list", set(main.exclude), set(side.exclude)),
        ("quantized_layers", set(main.layers.items()), set(side.layers.items())),
    ):
        if here and there and here != there:
            only = f"{len(here - there)} entries stand only in {CONFIG}, {len(there - here)} only in {SIDE_FILE}"
            found.append(_contradiction(key, only, "", used, "compare both with what the tensors are"))
    if main.kv_cache != side.kv_cache:
        found.append(
            warning(
                "kv_cache_contradiction",
                f"KV cache: {CONFIG} says {main.kv_cache or 'nothing'}, {SIDE_FILE} says {side.kv_cache or 'nothing'}",
                f"`--kv-cache-dtype auto` follows {used.file}: {used.kv_cache or 'no quantised cache'}",
                "write --kv-cache-dtype on the command line",
            )
        )
    return found


def _contradiction(key: str, here: object, there: object, used: QuantConfig, cure: str) -> Finding:
    what = f"{CONFIG} says {here}, {SIDE_FILE} says {there}" if there else str(here)
    return warning(
        "config_contradiction", f"{key}: {what}", f"vLLM follows {used.file}", f"{cure}; {used.file} is what counts"
    )
