"""Quantisation configurations of ModelOpt, compressed-tensors and Quark, and what they state.

A checkpoint carries up to two: `quantization_config` in config.json, and hf_quant_config.json, which vLLM reads where
the first is missing, or for the per-layer map where the first has none (transformers_utils/config.py, weight_utils.py).
Nothing here looks at tensors: what is stored decides.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from overlay.checkpoint.tiny_config import CheckpointError
from overlay.nvfp4.promotion import config_groups

CONFIG, SIDE_FILE = "config.json", "hf_quant_config.json"
UNQUANTISED = "unquantised"


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored and its input quantised (None: 16 bits). `known`: vLLM has such a method."""

    weights: str
    activations: str | None = None
    known: bool = True

    def __str__(self) -> str:
        if self.weights == "nvfp4":
            return f"NVFP4 {'W4A4' if self.activations else 'W4A16'}"
        return self.weights.upper() if self.activations or not self.known else f"{self.weights.upper()} weight-only"


W4A4, W4A16 = Scheme("nvfp4", "nvfp4"), Scheme("nvfp4")
# ModelOpt's names (vLLM's LINEAR_ALGOS and the block formats beside it).
ALGORITHMS = {
    "NVFP4": W4A4,
    "W4A16_NVFP4": W4A16,
    "MXFP8": Scheme("mxfp8", "mxfp8"),
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES"), Scheme("fp8", "fp8")),
    **{name.upper(): Scheme(name) for name in ("iq2_xs", "iq2_xxs", "q8_0")},
}


@dataclass(frozen=True)
class Group:
    """One `config_groups` entry: the modules it is for (none: all) and their scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class QuantConfig:
    """One quantisation configuration. `file` says where it stands, `nested` that it has the form of the side file.

    `inner`: it does not stand at the top level of config.json, so that vLLM looks into the side file before.
    """

    file: str
    document: Mapping
    nested: bool
    inner: bool = False

    @cached_property
    def body(self) -> Mapping:
        """The mapping that holds the settings: below "quantization" in the side file's form."""
        inner = self.document.get("quantization")
        return inner if isinstance(inner, Mapping) else self.document

    @cached_property
    def method(self) -> str:
        """`modelopt`, `compressed-tensors`, `quark`, what else the file says, or "" where it has the form of none."""
        named = self._named
        if named.startswith("modelopt") or (not named and self.producer.startswith("modelopt")):
            return "modelopt"
        if not named and ("format" in self.body or "quantization_status" in self.body):
            return "compressed-tensors"
        return named

    @property
    def _named(self) -> str:
        return str(self.document.get("quant_method") or "").lower().replace("_", "-")

    @property
    def recognised(self) -> bool:
        """Does vLLM see a quantisation here? It does not go by the form (model_arch_config_convertor.py, 0.33.0)."""
        signed = self.producer.split(" ")[0] == "modelopt" and bool(self.algorithm)
        return bool(self._named) or (self.nested and (signed or "modelopt_quant_config" in self.body))

    @cached_property
    def producer(self) -> str:
        producer = self.document.get("producer")
        if not isinstance(producer, Mapping):
            return ""
        return " ".join(str(producer[key]) for key in ("name", "version") if key in producer)

    @cached_property
    def algorithm(self) -> str:
        """ModelOpt's label in capitals; "" for other methods."""
        return str(self.body.get("quant_algo") or "").upper()

    @cached_property
    def exclude(self) -> tuple[str, ...]:
        """Modules that are not quantised, in the method's own pattern language."""
        keys = ("exclude_modules",) if self.nested else ("ignore", "exclude_modules", "exclude")
        return _strings(next((self.body[key] for key in keys if key in self.body), None))

    @cached_property
    def layers(self) -> Mapping[str, Scheme]:
        """Module name -> scheme: ModelOpt's map of a MIXED_PRECISION checkpoint."""
        listed = self.body.get("quantized_layers")
        if not isinstance(listed, Mapping):
            return {}
        return {
            name: algorithm(entry.get("quant_algo")) for name, entry in listed.items() if isinstance(entry, Mapping)
        }

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        if self.method == "quark":
            by_layer = self.body.get("layer_quant_config")
            named = by_layer.items() if isinstance(by_layer, Mapping) else ()
            everywhere = Group((), _quark_scheme(self.body.get("global_quant_config")))
            return (*(Group((pattern,), _quark_scheme(entry)) for pattern, entry in named), everywhere)
        # ModelOpt writes the groups at the top or below "quantization", as a table or as a list.
        return tuple(
            Group(_strings(group.get("targets")), _group_scheme(group)) for group in config_groups(self.document)
        )

    @cached_property
    def kv_cache(self) -> str | None:
        """`fp8`, `nvfp4`, or None: the KV cache type that the file asks for."""
        scheme = self.body.get("kv_cache_scheme") or self.body.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            return {8: "fp8", 4: "nvfp4"}.get(scheme.get("num_bits")) if scheme.get("type") == "float" else None
        return str(scheme).lower() if scheme else None

    @cached_property
    def weight_only(self) -> bool:
        """Groups are there and none of them quantises activations."""
        return bool(self.groups) and not any(group.scheme.activations for group in self.groups)

    @cached_property
    def promoted(self) -> bool:
        """vLLM 0.29 and later take NVFP4 in exactly this shape for weight-only (modelopt.py, _from_config)."""
        groups = self.document.get("config_groups")
        return (
            isinstance(groups, Mapping)
            and bool(groups)
            and all(isinstance(group, Mapping) and group.get("input_activations") is None for group in groups.values())
        )


@dataclass(frozen=True)
class Statement:
    """What a configuration says of a checkpoint, before its tensors are looked at.

    `label`: `NVFP4 W4A4`, `NVFP4 W4A16`, `mixed: ...`, another scheme, `unquantised` or `undetermined`.
    `activation_scales`: whether tensors with activation scales belong to it.
    """

    label: str
    activation_scales: Literal["all", "none", "some", "unknown"]


def load_json(file: Path) -> Mapping | None:
    """A JSON object from a file; None where there is no such file. Raises CheckpointError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{file} cannot be read as JSON: {problem}") from problem
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds a JSON {type(document).__name__}, not an object")
    return document


def architecture(config: Mapping) -> str:
    """The first architecture that config.json names; "" where it names none."""
    return next(iter(_strings(config.get("architectures"))), "")


def read(document: Mapping | None, file: str = CONFIG) -> QuantConfig | None:
    """The quantisation configuration in config.json (top level first, as vLLM), in the side file, or given bare."""
    if document is None:
        return None
    text = document.get("text_config")
    places = (
        document.get("quantization_config"),
        _get(text, "quantization_config"),
        document.get("compression_config"),
    )
    found = next((place for place in places if isinstance(place, Mapping)), None)
    inner = found is not None and found is not places[0]
    if found is None and any(
        key in document for key in ("quantization", "quant_algo", "config_groups", "quant_method")
    ):
        found = document
    if found is None:
        return None
    return QuantConfig(file, found, isinstance(found.get("quantization"), Mapping), inner)


def in_effect(main: QuantConfig | None, side: QuantConfig | None) -> QuantConfig | None:
    """The one of the two that vLLM uses (transformers_utils/config.py, weight_utils.py)."""
    if main is not None and main.inner and side is not None:
        return side
    if main is not None and main.algorithm == "MIXED_PRECISION" and not main.layers and side is not None:
        return side
    return main or side


def state(config: QuantConfig | None) -> Statement:
    """What the configuration states about the checkpoint as a whole."""
    if config is None:
        return Statement(UNQUANTISED, "none")
    if config.layers:
        schemes = set(config.layers.values())
    elif config.groups:
        schemes = {group.scheme for group in config.groups}
    elif config.algorithm in ALGORITHMS:
        # A label and nothing else says neither which modules are quantised nor how. Public stubs of mixed checkpoints
        # look like this.
        if config.nested and not config.producer and "group_size" not in config.body:
            return Statement("undetermined", "unknown")
        schemes = {ALGORITHMS[config.algorithm]}
    else:
        return Statement("undetermined", "unknown")
    names = sorted(map(str, schemes))
    quantised = {bool(scheme.activations) for scheme in schemes if scheme.weights == "nvfp4"}
    scales = {frozenset({True}): "all", frozenset({True, False}): "some"}.get(frozenset(quantised), "none")
    return Statement(names[0] if len(names) == 1 else f"mixed: {' + '.join(names)}", scales)


def algorithm(label: object) -> Scheme:
    """Scheme of one of ModelOpt's labels."""
    name = str(label or "").upper()
    return ALGORITHMS.get(name, Scheme(name, None, known=False))


def _group_scheme(group: Mapping) -> Scheme:
    """Scheme of a compressed-tensors style group; an empty activation table says as much as null."""
    weights, activations = group.get("weights"), group.get("input_activations")
    return Scheme(_number_format(weights), _number_format(activations) if activations else None)


def _number_format(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return UNQUANTISED
    bits, kind, size = entry.get("num_bits"), entry.get("type"), entry.get("group_size")
    if kind == "float":
        return {(4, 16): "nvfp4", (4, None): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}.get((bits, size), f"fp{bits}")
    return f"{kind}{bits}"


def _quark_scheme(entry: object) -> Scheme:
    """Quark gives NVFP4 as lists of two stages: fp4 by groups of 16, then the groups' scales as fp8 by tensor."""
    weights, inputs = _get(entry, "weight"), _get(entry, "input_tensors")
    return Scheme(_quark_format(weights), _quark_format(inputs) if inputs else None)


def _quark_format(stages: object) -> str:
    stages = stages if isinstance(stages, list) else [stages]
    if not all(isinstance(stage, Mapping) for stage in stages):
        return UNQUANTISED
    names = [stage.get("dtype") for stage in stages]
    if names == ["fp4", "fp8_e4m3"] and stages[0].get("group_size") == 16:
        return "nvfp4"
    if names == ["fp4"] and stages[0].get("group_size") == 32:
        return "mxfp4"
    return {"fp8_e4m3": "fp8"}.get(names[0], str(names[0]))


def _strings(values: object) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


def _get(mapping: object, key: str) -> object:
    return mapping.get(key) if isinstance(mapping, Mapping) else None
