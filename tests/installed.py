"""What releases of vLLM do differently by themselves. The tests expect these things of stock vLLM by name."""

from overlay.sources import VllmSources

SOURCES = VllmSources.find()


def since(*release: int) -> bool:
    """Is the installed vLLM this release or a later one? What has no plain release number counts as the newest."""
    return SOURCES.release is None or SOURCES.release >= release


READS_NULL_ACTIVATIONS = since(0, 29)  # takes groups with "input_activations": null for weight-only (#54427)
LOOKS_FOR_BLOCK_SCALES = since(0, 30)  # in ModelOpt's linear layers
LINEAR_CLASSES_ARE_ONE = since(0, 30)  # ModelOpt's: W4A4 and W4A16 had a class each
HAS_GLM = since(0, 30)
HAS_WEIGHT_CACHE = since(0, 30)  # of weights in a kernel's format
HAS_REQUANTISATION = since(0, 33)  # of NVFP4 experts, online
QUARK_RELOADS = since(0, 30)
READS_NESTED_MIXED_PRECISION = since(0, 33)  # from a file of its own
QUARK_REFUSES_A_MISMATCH = not since(0, 30)  # of gate's and up's global scales, where others compute with gate's
CUTLASS_SPANS_RANKS = since(0, 32)
NATIVE_WRITES_ROWS = since(0, 31)  # without rope, to the cache: in 0.30 the native backend serves no model of this kind
