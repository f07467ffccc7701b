"""NVFP4 scales: which are usable, how the others are repaired, and what happens to a layer that has none."""
