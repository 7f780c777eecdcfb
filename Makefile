PYTHON ?= python3
TORCH ?= torch==2.13.0
