"""Llama and the checkpoints shaped like it: SmolLM2, Mistral without a sliding window."""
