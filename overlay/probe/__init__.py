"""Harnesses that drive single parts of vLLM against references of our own, without an engine."""
