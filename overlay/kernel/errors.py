"""Errors of the kernel's compiler, cache and launcher."""

from overlay.errors import OverlayError


class KernelError(OverlayError):
    """The kernel cannot be built, loaded or called as asked; the message names what is wrong and the way out."""


class CompileError(KernelError):
    """NVRTC is missing, too old for the architecture, or refuses the source."""
