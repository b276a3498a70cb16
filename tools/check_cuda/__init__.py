"""Checks of the CUDA path that need no GPU, each a command of its own; `make check-cuda` runs all."""
