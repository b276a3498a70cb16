"""Command-line programs around a run, each a module for `python -m`."""
