"""From services to a run: rollouts, phases, and the controller's state."""
