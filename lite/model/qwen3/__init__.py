"""Qwen3 dense: RMSNorm on every query and key head, head size apart from the hidden size."""
