"""Find figures whose measured code has changed since.

    python -m tools.figures --stale

A figure's file states the commit that was measured. It is stale if a later commit changed its benchmark, or a path that
the figure depends on.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "answers": ("forge_rl/rewards",),
    "chaos": ("forge_rl/sandbox", "forge_rl/envs"),
    "chaos_process": ("forge_rl/sandbox", "forge_rl/envs"),
    "chaos_strict": ("forge_rl/sandbox", "forge_rl/envs"),
    "conformance": ("forge_rl/algorithms", "forge_rl/packing"),
    "data": ("forge_rl/data",),
    "demo": ("forge_rl/algorithms", "forge_rl/engines", "forge_rl/packing", "forge_rl/rollout", "recipes/grpo.py"),
    "evaluation": ("forge_rl/rollout", "forge_rl/run/evaluation/evaluator.py"),
    "expert_parallel": ("forge_rl/engines/titan/least_loaded.py", "forge_rl/engines/titan/moe.py"),
    "forecast": ("forge_rl/engines/costs.py", "forge_rl/forecast/roofline.py", "forge_rl/forecast/search.py"),
    "gateway": ("forge_rl/gateway", "forge_rl/services/generator.py"),
    "gpu": ("forge_rl/engines", "forge_rl/weights"),
    "grpo_step": ("forge_rl/algorithms", "forge_rl/engines", "forge_rl/packing"),
    "hosts": ("forge_rl/weights", "forge_rl/services/weight_store.py"),
    "layouts": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/packing"),
    "long_rows": ("forge_rl/engines/titan", "forge_rl/engines/costs.py"),
    "long_run": ("forge_rl/metrics", "forge_rl/rollout", "forge_rl/runtime/processes.py"),
    "methods": ("forge_rl/algorithms", "forge_rl/packing"),
    "models": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/packing", "tests/zoo"),
    "numerics": ("forge_rl/engines/titan", "forge_rl/engines/vllm"),
    "overhead": ("forge_rl/rollout", "forge_rl/runtime", "forge_rl/services", "forge_rl/metrics", "forge_rl/packing"),
    "recording": ("forge_rl/metrics", "forge_rl/run/records/recording.py"),
    "recovery": ("forge_rl/runtime", "forge_rl/services/generator.py", "forge_rl/engines/vllm"),
    "router_replay": ("forge_rl/engines/titan/routing.py", "forge_rl/engines/vllm/cpu_routing.py"),
    "sandbox": ("forge_rl/sandbox",),
    "schedules": ("forge_rl/rollout",),
    "schedules_real": ("forge_rl/rollout", "forge_rl/engines/vllm"),
    "speculation": ("forge_rl/engines/speculation.py", "forge_rl/engines/vllm"),
    "tools": ("forge_rl/envs", "forge_rl/sandbox", "forge_rl/system/result_cache.py"),
    "trees": ("forge_rl/packing", "forge_rl/engines/titan"),
    "container_sessions": ("forge_rl/sandbox",),
    "update_cost": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/algorithms/logprobs.py"),
    "weights": ("forge_rl/weights", "forge_rl/services/weight_store.py"),
    "weights_model": ("forge_rl/weights", "forge_rl/services/weight_store.py", "forge_rl/engines/vllm/transfer.py"),
}
"""Paths, besides the benchmark itself, whose changes may move a figure; by the name of the figure's file."""


def stale(folder: Path) -> Iterator[str]:
    """Describe each figure of a folder in a Git checkout that is older than a change of its paths, or may be."""
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        commit, _, uncommitted = report["commit"].partition(" ")
        paths = (benchmark_path(report["command"]), *DEPENDENCIES[path.stem])
        try:
            changes = _git(
                folder,
                "log",
                "--no-merges",
                "--format=%h %s",
                f"{commit}..HEAD",
                "--",
                *(f":/{name}" for name in paths),
            )
        except subprocess.CalledProcessError:
            yield f"{path.stem}: its commit {commit} is not in this clone's history"
            continue
        if changes:
            yield f"{path.stem}: commits since {commit[:8]}: {len(changes)}; the last: {changes[0]}"
        elif uncommitted:
            yield f"{path.stem}: measured at {commit[:8]} {uncommitted}"


def benchmark_path(command: str) -> str:
    """Return the file or package of the benchmark that a command `python -m benchmarks.NAME` runs."""
    path = Path(command.split()[2].replace(".", "/"))
    return str(path if path.joinpath("__main__.py").exists() else path.with_suffix(".py"))


def _git(folder: Path, *words: str) -> Sequence[str]:
    """Return the lines that a Git command prints."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
