"""A module as one of its users sees it: some attributes answered here, the rest passed on."""

from typing import Any


class Substitute:
    """`base` with `attributes` in place of its own. For functions whose only seam is a global that they look up."""

    def __init__(self, base: object, **attributes: Any) -> None:
        self._base = base
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)
