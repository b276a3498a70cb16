"""Flags of earlier versions that are constants now, or have other names; run folders and files may still hold them."""

from __future__ import annotations

RETIRED = {
    "restart.backoff_s": 1.0,
    "restart.pause_s": 300.0,
    "restart.healthy_s": 60.0,
    "generator.request_deadline_s": 3600.0,
    "teachers.request_deadline_s": 600.0,
    "alerts.most_per_hour": 60,
    "alerts.deadline_s": 10.0,
    "curriculum.momentum": 0.5,
    "weights.keep_gib": 64.0,
    "curriculum.most_tasks": 1_000_000,
    "recording.episodes": 4096,
    "agent_limits.open_files": 1024,
}
"""Default of each retired flag, by the end of its path."""
RENAMED = {"least_replicas": "min_replicas", "most_replicas": "max_replicas"}
"""New name of each renamed flag, by the last part of its path."""


def current_path(path: str) -> str:
    """Return a flag's current path: "generator.min_replicas" for "generator.least_replicas"."""
    group, dot, name = path.rpartition(".")
    return group + dot + RENAMED.get(name, name)


def retired_default(path: str) -> float | None:
    """Return the default of a retired flag, such as "generator.restart.pause_s"; None for any other flag."""
    return next((value for end, value in RETIRED.items() if f".{path}".endswith(f".{end}")), None)
