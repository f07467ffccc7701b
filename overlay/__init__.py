"""Patches that let an unmodified vLLM serve rope-free sparse-MLA models on sm_120 and sm_121."""

__version__ = "0.1.0"
