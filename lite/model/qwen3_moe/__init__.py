"""Qwen3 mixtures of experts: Qwen3 with routed experts in place of the MLP, in all layers or some."""
