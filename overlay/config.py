"""patches.toml and the OVERLAY_ variables, validated against what the patches declare.

Every error names the file, the line and the nearest valid name: a switch that is misspelt must not be a switch that is
silently off.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.declare import Option, Patch, Switch
from overlay.errors import ConfigError
from overlay.log import LEVELS

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FILE = ROOT / "patches.toml"

OVERLAY_OPTIONS = (
    Option(
        "strict", bool, True, "a wanted patch that cannot be applied stops the engine; false: it is logged as an error"
    ),
    Option("log", str, "info", "least severe message to print", choices=LEVELS),
)
SWITCHES: Mapping[str, Switch] = {"auto": "auto", "true": True, "false": False}


@dataclass(frozen=True)
class PatchSettings:
    """One patch's switch, where it was set, and its typed options with defaults filled in."""

    switch: Switch
    origin: str
    options: Mapping[str, object]


@dataclass(frozen=True)
class Config:
    """Everything a user can set, for every known patch."""

    file: Path
    strict: bool
    log: str
    patches: Mapping[str, PatchSettings]


def load(patches: Iterable[Patch], environ: Mapping[str, str] = os.environ) -> Config:
    """Read the TOML file (OVERLAY_CONFIG, else the checkout's) and OVERLAY_PATCHES; raises ConfigError."""
    file = Path(environ.get("OVERLAY_CONFIG") or DEFAULT_FILE).absolute()
    reader = _Reader(file)
    declared = {patch.id: patch for patch in patches}
    top = reader.section((), ("overlay", "patches"))
    overlay = reader.values(("overlay",), top.get("overlay", {}), OVERLAY_OPTIONS)
    tables = reader.section(("patches",), declared, top.get("patches", {}))
    overrides = _overrides(environ.get("OVERLAY_PATCHES", ""), declared)

    settings = {}
    for patch in declared.values():
        place = ("patches", patch.id)
        if not isinstance(tables.get(patch.id, {}), dict):
            raise reader.error(("patches",), patch.id, "must be a table")
        table = dict(tables.get(patch.id, {}))
        origin = file.name if "enabled" in table else "default"
        switch = reader.switch(place, table.pop("enabled", patch.default))
        if patch.id in overrides:
            switch, origin = overrides[patch.id], "OVERLAY_PATCHES"
        settings[patch.id] = PatchSettings(switch, origin, reader.values(place, table, patch.options, ("enabled",)))
    return Config(file=file, strict=bool(overlay["strict"]), log=str(overlay["log"]), patches=settings)


class _Reader:
    """The parsed file together with its text, so that an error can name a line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.text = file.read_text(encoding="utf-8")
            self.document = tomllib.loads(self.text)
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; set OVERLAY_CONFIG to your TOML file, or unset it") from None
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: is not valid TOML: {error}") from error

    def section(
        self, place: tuple[str, ...], known: Iterable[str], table: object | None = None
    ) -> Mapping[str, object]:
        """A table whose keys must all be known."""
        table = self.document if table is None else table
        if not isinstance(table, dict):
            raise self.error(place[:-1], place[-1], "must be a table")
        for key in table:
            if key not in known:
                raise self.error(place, key, f"is not a known name{nearest(key, known)}")
        return table

    def values(
        self, place: tuple[str, ...], table: object, options: Iterable[Option], also: tuple[str, ...] = ()
    ) -> dict[str, object]:
        """Typed values for every option, defaults where the table has none."""
        by_name = {option.name: option for option in options}
        given = self.section(place, [*by_name, *also], table)
        return {name: self.check(place, option, given.get(name, option.default)) for name, option in by_name.items()}

    def check(self, place: tuple[str, ...], option: Option, value: object) -> object:
        types = option.type if isinstance(option.type, tuple) else (option.type,)
        if float in types and type(value) is int:
            value = float(value)
        if type(value) not in types and value is not option.default:  # bool is an int to isinstance
            names = " or ".join(kind.__name__ for kind in types)
            raise self.error(place, option.name, f"must be {names}, not {type(value).__name__} ({value!r})")
        if option.choices and isinstance(value, str) and value not in option.choices:
            allowed = ", ".join(repr(choice) for choice in option.choices)
            raise self.error(place, option.name, f"is {value!r}; it must be one of {allowed}")
        if option.limits and type(value) in (int, float):
            least, most = option.limits
            if not least <= value <= most:  # not a number is in no range
                raise self.error(place, option.name, f"is {value!r}; it must be from {least:g} to {most:g}")
        return value

    def switch(self, place: tuple[str, ...], value: object) -> Switch:
        if value == "auto" or isinstance(value, bool):
            return value  # type: ignore[return-value]
        raise self.error(place, "enabled", f'is {value!r}; it must be "auto", true or false')

    def error(self, place: tuple[str, ...], key: str, what: str) -> ConfigError:
        name = ".".join((*place, key))
        return ConfigError(f"{self.file}:{self.line(place, key)}: {name} {what}")

    def line(self, place: tuple[str, ...], key: str) -> int:
        """Line of `key` in table `place`, of the header `[place.key]`, or else of the table's own header."""
        lines = self.text.splitlines()
        header, inside, fallback = ".".join(place), not place, 1
        for number, line in enumerate(lines, 1):
            if found := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
                name = found[1].replace('"', "").replace("'", "").replace(" ", "")
                inside = name == header
                if f"{name}.".startswith(f"{header}.{key}.".lstrip(".")):
                    return number
                if inside:
                    fallback = number
            elif inside and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return number
        return fallback


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of names where none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known)) or 'none'}"


def _overrides(text: str, declared: Mapping[str, Patch]) -> dict[str, Switch]:
    """`id=false,id=true` from OVERLAY_PATCHES."""
    switches: dict[str, Switch] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or value not in SWITCHES:
            raise ConfigError(f"OVERLAY_PATCHES: {item!r} is not of the form id=auto, id=true or id=false")
        if name not in declared:
            raise ConfigError(f"OVERLAY_PATCHES: {name!r} is not a patch{nearest(name, declared)}")
        switches[name] = SWITCHES[value]
    return switches
