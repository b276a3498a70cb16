"""A run, from its settings to its summary: config, start, phases, monitor, run folder."""
