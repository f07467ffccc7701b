"""Errors a user can meet. None derives from ImportError: vLLM swallows those while it tries attention backends."""


class OverlayError(RuntimeError):
    """Anything the overlay refuses to go on with; the message says what to do about it."""


class ConfigError(OverlayError):
    """The TOML file or an OVERLAY_ variable cannot be used as it stands."""


class PatchError(OverlayError):
    """A patch is wanted and cannot be applied."""
