"""Nemotron-H hybrids: layers of one block each, Mamba-2, attention without rotary, mixture of experts or MLP, in any pattern."""
