"""One module a command; none imports vllm, torch or cupy before it runs."""
