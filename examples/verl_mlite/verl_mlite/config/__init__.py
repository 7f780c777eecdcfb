"""Hydra groups, found by `hydra.searchpath=[pkg://verl_mlite.config]`."""
