"""Environments: what a model meets between its answers."""
