"""The installed vLLM, read as text: where it is, its version, the signatures of its functions; nothing is imported."""

import ast
import re
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from overlay import hooks

# The releases whose sources the patches were written against and are tested with (docs/patches.md).
TESTED_FROM, TESTED_TO = (0, 27, 1), (0, 33, 0)


class VllmSources:
    """Source files of the vLLM package below `root` (the folder that holds its `__init__.py`)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def find(cls) -> "VllmSources | None":
        """The vLLM that `import vllm` would take, or None.

        Every finder is asked as an import asks them: `pip install -e` leaves no folder on the path, but a finder.
        """
        return cls.of(hooks.find_spec(None, "vllm", None, None))

    @classmethod
    def of(cls, spec: ModuleSpec | None) -> "VllmSources | None":
        """The sources of the package that `spec` executes; None where it is not a folder of Python files."""
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        return cls(origin.parent) if origin is not None and origin.name == "__init__.py" and origin.is_file() else None

    @cached_property
    def version(self) -> str:
        """What the package's own `_version.py` says, so that files laid in front of another wheel count."""
        path = self.root / "_version.py"
        found = (
            re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", path.read_text(), re.M)
            if path.exists()
            else None
        )
        return found[1] if found else "unknown"

    @property
    def release(self) -> tuple[int, ...] | None:
        """(0, 33, 0) for a plain release or its post and local builds; None for development versions and images."""
        found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+.*)?", self.version)
        return tuple(int(part) for part in found.groups()) if found else None

    @property
    def tested(self) -> bool:
        return self.release is not None and TESTED_FROM <= self.release <= TESTED_TO

    def path(self, module: str) -> Path | None:
        """File of a module such as `vllm.platforms.cuda`, or None."""
        relative = self.root.joinpath(*module.split(".")[1:])
        candidates = (
            (relative.with_suffix(".py"), relative / "__init__.py") if module != "vllm" else (relative / "__init__.py",)
        )
        return next((path for path in candidates if path.is_file()), None)

    def has(self, module: str) -> bool:
        return self.path(module) is not None

    def text(self, module: str) -> str:
        """Source text of a module; empty where there is none."""
        path = self.path(module)
        return path.read_text(encoding="utf-8") if path else ""

    def tree(self, module: str) -> ast.Module:
        return _parse(self.path(module))

    def definition(self, module: str, qualname: str) -> ast.AST | None:
        """The def, class or assignment that gives `Class.method` or `name` its value in that module, or None."""
        node: ast.AST = self.tree(module)
        for part in qualname.split("."):
            found = _member(node, part)
            if found is None:
                return None
            node = found
        return node

    def source_of(self, module: str, qualname: str) -> str:
        """Source text of one definition; empty where there is none."""
        node = self.definition(module, qualname)
        return ast.get_source_segment(self.text(module), node) or "" if node is not None else ""

    def signature(self, module: str, qualname: str) -> str | None:
        """Normal form of a function's parameters; None where it is not a function or not there."""
        node = self.definition(module, qualname)
        return normal_signature(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def normal_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters with annotations dropped and defaults as `...`: `(cls, backend, config, num_heads=...)`."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parts = [a.arg + ("=..." if i >= first_default else "") for i, a in enumerate(positional)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        parts.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        a.arg + ("=..." if default is not None else "")
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parts.append("**" + arguments.kwarg.arg)
    return f"({', '.join(parts)})"


@lru_cache(maxsize=64)
def _parse(path: Path | None) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path)) if path else ast.Module(body=[], type_ignores=[])


def _member(node: ast.AST, name: str) -> ast.AST | None:
    """Last binding of `name` in a module's or class's body, looking into if, try and with blocks."""
    found = None
    for child in _bindings(getattr(node, "body", [])):
        if name in _names(child):
            found = child
    return found


def _names(statement: ast.stmt) -> set[str]:
    """Names that one statement binds by def, class or assignment."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _bindings(body: list[ast.stmt]):
    for child in body:
        if isinstance(child, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(child, block, []))
            for handler in getattr(child, "handlers", []):
                yield from _bindings(handler.body)
        else:
            yield child
