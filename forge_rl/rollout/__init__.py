"""Rollouts: the scheduler (pure logic), the executor of its decisions, and the runner of one episode."""
