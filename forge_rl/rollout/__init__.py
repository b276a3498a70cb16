"""Rollouts: the scheduler (pure logic), the executor of its decisions, and the episode runner."""
