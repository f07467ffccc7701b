"""Which weight files vLLM would load from a folder, and whether shards and index tell the same story.

vLLM 0.33.0 (model_loader/default_loader.py): `consolidated*.safetensors`, if there is one, else all `*.safetensors`; of
these only the files that the index names, where there is an index. It then loads every tensor of those files, whatever
the index says of it; for quantised models nothing checks afterwards that every parameter was loaded.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay.checkpoint.audit_config import load_json
from overlay.checkpoint.audit_headers import HeaderError, Tensor, read_header
from overlay.checkpoint.findings import Finding, error, info, some, warning
from overlay.checkpoint.tiny_config import CheckpointError

INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Weights:
    """What vLLM would load: tensors by name, the files they are in, and what is wrong with the files.

    `complete`: every file is there and readable, so a tensor that is not in `tensors` is nowhere.
    """

    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    findings: tuple[Finding, ...]

    @property
    def complete(self) -> bool:
        return not any(f.check in ("no_safetensors", "absent_file", "unreadable_shard") for f in self.findings)


def read(folder: Path) -> Weights:
    """The headers of every file that vLLM would load from `folder`. Unreadable files are findings."""
    present = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    if not present:
        return Weights({}, (), tuple(_no_weights(folder)))
    consolidated = [name for name in present if name.startswith("consolidated")]
    index, found = _index(folder, "consolidated.safetensors.index.json" if consolidated else INDEX)
    chosen = consolidated or list(present)
    if index is not None:
        named = set(index.values())
        found += _absent_files(named - set(present), index)
        chosen = [name for name in chosen if name in named]
    mistral = (folder / "params.json").exists()
    found += _other_sets(list(present), consolidated, index, mistral)
    if index is None:
        found += _unnumbered(chosen)
    tensors, seen_in, readable = {}, {}, set()
    for name in chosen:
        try:
            header = read_header(present[name])
        except HeaderError as problem:
            found.append(_unreadable(name, problem))
            continue
        readable.add(name)
        for tensor in header.values():
            seen_in.setdefault(tensor.name, []).append(name)
            tensors[tensor.name] = tensor
    found += _twice(seen_in)
    if index is not None:
        found += _index_against_shards(index, seen_in, readable)
    return Weights(tensors, tuple(present[name] for name in chosen), tuple(found))


def _no_weights(folder: Path) -> list[Finding]:
    other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern))
    return [
        error(
            "no_safetensors",
            "there is no *.safetensors file" + (f"; {some(other)} cannot be audited" if other else ""),
            "vLLM finds no weights" if not other else "vLLM would load those files; this audit reads safetensors only",
            "download the weights" if not other else "use a safetensors export",
        )
    ]


def _index(folder: Path, name: str) -> tuple[Mapping[str, str] | None, list[Finding]]:
    """The index's map of tensor name -> file name, None where there is none or it cannot be used."""
    try:
        document = load_json(folder / name)
    except CheckpointError as problem:
        return None, [_bad_index(name, f"cannot be read: {problem}")]
    if document is None:
        return None, []
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        return None, [_bad_index(name, "has no weight_map of tensor names to file names")]
    return mapping, []


def _bad_index(name: str, what: str) -> Finding:
    return error("bad_index", f"{name} {what}", "vLLM stops when it reads the index", "download it again")


def _unreadable(name: str, problem: HeaderError) -> Finding:
    return error("unreadable_shard", f"{name} {problem}", "vLLM stops when it opens the file", f"download {name} again")


def _absent_files(names: set[str], index: Mapping[str, str]) -> list[Finding]:
    tensors = sum(file in names for file in index.values())
    return (
        [
            error(
                "absent_file",
                f"the index names {len(names)} files with {tensors} tensors that are not there: {some(sorted(names))}",
                "vLLM raises FileNotFoundError: Weight files referenced in index but missing",
                "download them",
            )
        ]
        if names
        else []
    )


def _other_sets(
    present: Sequence[str], consolidated: Sequence[str], index: Mapping[str, str] | None, mistral: bool
) -> list[Finding]:
    """A second set of weights in the folder, and files that the index does not name.

    `mistral`: params.json is there as well, which vLLM then takes in place of config.json: Mistral's own releases are
    made like this.
    """
    if consolidated and len(consolidated) < len(present):
        rest = [name for name in present if name not in consolidated]
        if mistral:
            return [
                warning(
                    "two_weight_sets",
                    f"{some(consolidated)} and params.json stand beside {some(rest)} and config.json",
                    "vLLM's formats `auto` take the former; config.json, which is judged here, describes the latter",
                    "--config-format hf --load-format safetensors serves what config.json describes",
                )
            ]
        return [
            error(
                "two_weight_sets",
                f"{some(consolidated)} stand beside {some(rest)}",
                "vLLM's load format `auto` takes the consolidated files, whose names follow another scheme",
                "--load-format safetensors, or remove the set that is not wanted",
            )
        ]
    if index is None:
        sets = {NUMBERED.fullmatch(name)[1] if NUMBERED.fullmatch(name) else name for name in present}
        totals = {NUMBERED.fullmatch(name)[3] for name in present if NUMBERED.fullmatch(name)}
        if any(NUMBERED.fullmatch(name) for name in present) and (len(sets) > 1 or len(totals) > 1):
            return [
                error(
                    "two_weight_sets",
                    f"several sets of weights without an index: {some(sorted(present))}",
                    "vLLM loads all of them, one over the other",
                    f"add {INDEX}, or remove the set that is not wanted",
                )
            ]
        return []
    outside = sorted(set(present) - set(index.values()))
    return (
        [
            warning(
                "file_outside_index",
                f"{len(outside)} files stand outside the index: {some(outside)}",
                "vLLM does not load them; other tools may",
                "remove them, or add their tensors to the index if they belong to the model",
            )
        ]
        if outside
        else []
    )


def _unnumbered(names: Sequence[str]) -> list[Finding]:
    """Shards that are missing by their own numbering, where no index says what there should be."""
    found = []
    by_set: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if parts := NUMBERED.fullmatch(name):
            by_set.setdefault((parts[1], int(parts[3])), set()).add(int(parts[2]))
    for (stem, total), numbers in by_set.items():
        missing = sorted(set(range(1, total + 1)) - numbers)
        if missing:
            names_of = [f"{stem}-{number:05}-of-{total:05}.safetensors" for number in missing[:1000]]
            found.append(
                error(
                    "absent_file",
                    f"{len(missing)} of {total} shards are not there, and no index: {some(names_of)}",
                    "vLLM loads the others; with quantised models nothing notices that parameters were never loaded",
                    "download them",
                )
            )
    return found


def _twice(seen_in: Mapping[str, Sequence[str]]) -> list[Finding]:
    double = {name: files for name, files in seen_in.items() if len(files) > 1}
    if not double:
        return []
    name, files = next(iter(double.items()))
    return [
        error(
            "tensor_twice",
            f"{len(double)} tensors stand in two shards: {name} in {some(files)}",
            "vLLM loads both, and the file that happens to come last wins",
            "download the shards again; they are of two exports",
        )
    ]


def _index_against_shards(
    index: Mapping[str, str], seen_in: Mapping[str, Sequence[str]], readable: Collection[str]
) -> list[Finding]:
    """Tensors whose place is another than the index says. What files hold that cannot be read is not known."""
    found = []
    nowhere = sorted(name for name, file in index.items() if name not in seen_in and file in readable)
    if nowhere:
        found.append(
            error(
                "tensor_in_none",
                f"the index names {len(nowhere)} tensors that no shard has: {some(nowhere)}",
                "nothing notices with quantised models: what they belong to computes with uninitialised memory",
                "download the shards again; index and shards are of two exports",
            )
        )
    misplaced = sorted(name for name, file in index.items() if name in seen_in and file not in seen_in[name])
    if misplaced:
        found.append(
            warning(
                "tensor_misplaced",
                f"{len(misplaced)} tensors stand in another shard than the index says: {some(misplaced)}",
                "vLLM does not care; loaders that read single shards miss them",
                "get index and shards of one export",
            )
        )
    unlisted = sorted(name for name in seen_in if name not in index)
    if unlisted:
        found.append(
            info(
                "tensor_outside_index",
                f"{len(unlisted)} tensors are in the shards and not in the index: {some(unlisted)}",
                "vLLM loads them all the same; loaders that go by the index do not",
                "nothing to do",
            )
        )
    return found
