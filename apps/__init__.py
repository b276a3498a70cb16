"""Command-line programs around a run, each a module for `python -m`."""

import importlib.util
import sys

if importlib.util.find_spec("tyro") is None:
    sys.exit("error: this Python lacks what forge_rl needs\n  hint: source .venv/bin/activate, or first: make setup")
