"""What a patch is given: its options, the installed vLLM as text, the hardware, and the two ways to change a module."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

from overlay.errors import PatchError
from overlay.hardware import Hardware
from overlay.log import named
from overlay.sources import VllmSources


@dataclass
class Context:
    """One patch's view of this process. `undo` grows with every change, so that all of it can be taken back."""

    patch_id: str
    options: Mapping[str, object]
    wanted: Literal["auto"] | bool
    sources: VllmSources
    hardware: Hardware
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def vllm_version(self) -> str:
        return self.sources.version

    @property
    def release(self) -> tuple[int, ...] | None:
        return self.sources.release

    @property
    def log(self) -> logging.Logger:
        return named(f"overlay.{self.patch_id}")

    def wrap(self, module: ModuleType, qualname: str, wrapper: Callable) -> None:
        """Wrap `module.qualname` with wrapt: `wrapper(wrapped, instance, args, kwargs)`.

        Raises PatchError where an imported module already holds the unwrapped function: it would go on calling it.
        """
        import wrapt

        parent, attribute, original = wrapt.resolve_path(module, qualname)
        self._refuse_stale_bindings(module, attribute, original, parent is module)
        proxy = wrapt.wrap_function_wrapper(module, qualname, wrapper)
        # Spliced out of the chain: wrappers that other tools put around ours stay. Gone already is fine.
        self.undo.append(lambda: wrapt.unwrap_object(module, qualname, proxy, missing_ok=True))

    def replace(self, module: ModuleType, qualname: str, value: object) -> None:
        """Set `module.qualname` to `value`; creates the attribute where it is not there."""
        import wrapt

        owner_path, _, attribute = qualname.rpartition(".")
        owner = wrapt.resolve_path(module, owner_path)[2] if owner_path else module
        missing = object()
        before = vars(owner).get(attribute, missing)
        setattr(owner, attribute, value)
        self.undo.append(lambda: delattr(owner, attribute) if before is missing else setattr(owner, attribute, before))

    def roll_back(self) -> None:
        """Take back every change, the latest first."""
        while self.undo:
            self.undo.pop()()

    def _refuse_stale_bindings(self, module: ModuleType, attribute: str, original: object, at_top_level: bool) -> None:
        if not at_top_level:
            return
        holders = [
            name
            for name, other in list(sys.modules.items())
            if name.startswith("vllm.")
            and other is not module
            and getattr(other, "__dict__", {}).get(attribute) is original
        ]
        if holders:
            raise PatchError(
                f"{module.__name__}.{attribute} was taken over by {', '.join(holders)} before it could be wrapped; "
                "another tool imports vLLM's modules in an order that this patch does not know"
            )
