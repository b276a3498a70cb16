"""Checkpoints of a run: states of controller and trainer saved together, verified, mirrored and restored."""
