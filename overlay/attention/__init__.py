"""The sparse-MLA attention backend for vLLM: latent rows of 512, bf16 or per-tensor fp8, on our own kernel.

`choice` decides whether a layer is ours and imports nothing of vLLM. The other modules are imported only once it is.
"""
