"""Processes: hosts to named meshes, services of replicas, routing, and what happens when something fails."""

from forge_rl.runtime.monarch_log import secure_monarch_log

secure_monarch_log()  # before any module of this package imports Monarch
