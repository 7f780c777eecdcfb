"""The `mlite` command."""
