"""Learning curves of every method on small tasks, each with several seeds, in one run that is put back in between."""
