"""Programs around a run, each a module to run with python -m."""
