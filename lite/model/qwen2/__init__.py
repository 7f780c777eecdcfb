"""Qwen2 and Qwen2.5 dense: biases on the query, key and value projections."""
