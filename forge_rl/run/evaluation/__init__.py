"""Evaluations while a run trains: of generated answers, and of the loss on given examples."""
