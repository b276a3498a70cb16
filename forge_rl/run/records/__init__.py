"""A run's records of itself: its folder, its log and trace, the metrics of steps and the records of episodes."""
