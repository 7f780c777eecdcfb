"""Backwards of the visible kernels, by the formula; a module a training library."""
