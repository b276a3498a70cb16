"""Checks of the CUDA path that need no GPU, each its own command; `make check-cuda` runs all."""
