"""The sparse-MLA CUDA kernel: compiled at run time, cached, loaded and launched."""
