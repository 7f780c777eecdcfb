"""Measurements on one GPU; docs/speed.md says what each number means. Not part of the installed package."""
