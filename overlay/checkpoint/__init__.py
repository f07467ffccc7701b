"""Checkpoints on disk: small ones that show what an engine computes (the writer), and what is wrong with big ones."""
