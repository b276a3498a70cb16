"""Processes: hosts to named meshes, services of replicas, routing, and what happens when something fails."""
