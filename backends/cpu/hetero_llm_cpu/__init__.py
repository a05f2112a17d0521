"""The CPU backend: core groups as devices, Gloo groups, vLLM on CPU."""
