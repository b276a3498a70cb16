"""Data: sources of tasks, their mixture, and the scan before a run."""
