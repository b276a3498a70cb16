"""Find figures whose measured code has changed since.

    python -m tools.figures --stale

A figure's file states the commit that was measured. It is stale if the code of its benchmark, or of a path that the
figure depends on, is another now: Python files are compared without comments, docstrings, annotations, the texts of
messages, and the names of functions' local variables, so that prose and renames make no figure stale, nor do
imports and files that moved within those paths.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"forge_rl/{folder}/{name}.py" for name in names)


_PASSES = _files(
    "engines/titan",
    *("cpu_attention", "cpu_feed_forward", "cpu_norm", "gradient_sums", "head", "linear", "masks", "measures"),
    *("model", "rope", "rows", "scoring", "small_adamw", "train", "update"),
)
"""A trainer's passes and updates on CPU: without loading, saving, exports, adapters and a GPU's kernels."""
_EXPERTS = _files("engines/titan", "expert_rows", "least_loaded", "moe", "routing")
_PARALLEL = _files("engines/titan", "balance", "exchange", "parallel", "shards", "stages", "vocabulary")
_KERNELS = _files(
    "engines/titan",
    *("block_kernels", "expert_rows", "fused_block", "fused_head", "fused_products", "products", "row_attention"),
    *("triton_blocks", "triton_experts", "triton_products"),
)
"""A trainer's passes on a GPU."""
_DECODING = _files("engines/vllm", "arguments", "cpu", "engine", "pieces", "requests", "sampling", "steps")
_SCHEDULE = _files("rollout", "batch_planner", "capacity", "dispatcher", "executor", "scheduler", "state")
_SESSIONS = (*_files("sandbox", "bodies", "host", "pool", "session", "shared"), "forge_rl/sandbox/inside")
"""A sandbox's sessions on this machine, without images, workspaces and rented ones."""
_EPISODES = _files("envs", "play", "tool", "tools", "worker")
_VERSIONS = (
    *_files("weights", "fingerprints", "kernels", "line_loops", "manifest", "segment", "slices", "volume"),
    "forge_rl/weights/transports",
    "forge_rl/services/weight_store.py",
)
_WATCH = _files("runtime", "host_agent", "host_watcher", "pauses", "processes", "supervision", "supervisor", "watchdog")
_ADAPTERS = (
    *("forge_rl/models/adapter_products.py", "forge_rl/engines/vllm/adapters.py"),
    *_files("engines/titan", "adapter_switch", "factor_pairs", "lora"),
)
DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "adapters": (
        *(*_PASSES, *_ADAPTERS, *_files("engines/titan", "adapter_engine", "expert_adapters")),
        *("forge_rl/rollout/version_probes.py", "forge_rl/weights/effects.py"),
    ),
    "answers": ("forge_rl/rewards",),
    "chaos": (*_SESSIONS, *_EPISODES),
    "chaos_images": (*_SESSIONS, "forge_rl/sandbox/images"),
    "chaos_process": (*_SESSIONS, *_EPISODES),
    "chaos_strict": (*_SESSIONS, *_EPISODES),
    "conformance": ("forge_rl/algorithms", "forge_rl/packing"),
    "containers": (*_SESSIONS, "forge_rl/sandbox/images"),
    "data": ("forge_rl/data/sources", *_files("data", "mixture", "task_stream")),
    "demo": ("recipes/grpo.py", *_files("algorithms", "advantages", "aggregation", "losses"), *_SCHEDULE),
    "demo_adapters": ("recipes/grpo.py", *_ADAPTERS),
    "engine_start": (
        *_files("runtime", "fork_client", "fork_server", "replica", "replica_processes", "service"),
        *_files("engines/vllm", "engine", "preloaded", "transfer"),
        "forge_rl/services/generator.py",
    ),
    "evaluation": (*_SCHEDULE, "forge_rl/rollout/evaluation.py", "forge_rl/run/evaluation/evaluator.py"),
    "expert_parallel": ("forge_rl/engines/titan/least_loaded.py", "forge_rl/engines/titan/moe.py"),
    "forecast": ("forge_rl/engines/costs.py", *_files("forecast", "roofline", "search", "transfer")),
    "front_end": _files("engines/vllm", "internals", "pieces", "requests"),
    "gateway": (
        *_files("gateway", "chat", "connections", "constraints", "engine_client", "guard", "http", "prompt_renderer"),
        *_files("gateway", "reading", "request_state", "requests", "server", "sessions", "vllm_handlers"),
        "forge_rl/services/generator.py",
    ),
    "gpu": (*_PASSES, *_KERNELS, *_DECODING, "forge_rl/engines/vllm/transfer.py", *_VERSIONS),
    "grpo_step": (*_files("algorithms", "advantages", "logprobs", "losses"), *_PASSES, *_DECODING, "forge_rl/packing"),
    "host_deaths": _WATCH,
    "hosts": (*_VERSIONS, *_files("weights", "delta_codec", "delta_files", "deltas", "fanout")),
    "layouts": (*_PASSES, *_EXPERTS, *_PARALLEL, "forge_rl/engines/families", "forge_rl/packing"),
    "long_rows": (*_PASSES, "forge_rl/engines/titan/plan.py", "forge_rl/engines/costs.py"),
    "long_run": ("forge_rl/metrics", *_SCHEDULE, "forge_rl/rollout/tally.py", "forge_rl/runtime/processes.py"),
    "methods": ("forge_rl/algorithms", "forge_rl/packing"),
    "models": (
        *_PASSES,
        *_EXPERTS,
        *_files("engines/titan", "general_attention", "general_model", "general_routing", "general_state"),
        *("forge_rl/engines/families", "forge_rl/packing", "tests/zoo"),
    ),
    "models_native": (*_PASSES, *_EXPERTS, "forge_rl/engines/families", "forge_rl/packing"),
    "numerics": (*_PASSES, *_DECODING, "forge_rl/engines/vllm/prompt_scores.py"),
    "overhead": (
        *_SCHEDULE,
        *_files("rollout", "episode_runner", "tally"),
        *_files("runtime", "actor", "link", "replica", "service"),
        *_files("services", "environment", "generator", "reward"),
        *("forge_rl/metrics", "forge_rl/packing"),
    ),
    "recording": (
        *_files("metrics", "episode_files", "episode_reader", "recorder", "step_lines"),
        *("forge_rl/look/page", "forge_rl/run/records/recording.py"),
    ),
    "recovery": (
        *_WATCH,
        *_files("runtime", "fork_client", "fork_server", "replica", "replica_processes", "service"),
        *_files("engines/vllm", "engine", "preloaded", "steps", "transfer"),
        "forge_rl/services/generator.py",
    ),
    "router_replay": ("forge_rl/engines/titan/routing.py", "forge_rl/engines/vllm/cpu_routing.py"),
    "sandbox": (*_SESSIONS, "forge_rl/sandbox/workspaces/changes.py", "forge_rl/sandbox/workspaces/repositories.py"),
    "schedules": _SCHEDULE,
    "schedules_real": (*_SCHEDULE, *_DECODING),
    "speculation": (
        "forge_rl/engines/speculation.py",
        *_files("engines/vllm", "cpu_draft_model", "cpu_rejection", "drafting", "engine", "sampling", "suffixes"),
    ),
    "tools": (*_EPISODES, "forge_rl/envs/pure.py", *_SESSIONS, "forge_rl/system/result_cache.py"),
    "trees": ("forge_rl/packing", *_PASSES),
    "update_cost": (
        *_PASSES,
        *_KERNELS,
        *_files("algorithms", "logprobs", "score_kernels"),
        "forge_rl/engines/families",
    ),
    "weights": _VERSIONS,
    "weights_model": (*_VERSIONS, *_files("engines/vllm", "slicing", "transfer")),
}
"""Paths, besides the benchmark itself, whose changes may move a figure; by the name of the figure's file."""

_IMPORT = re.compile(r"^ *from benchmarks(?:\.(\w+)| import (\w+))", re.MULTILINE)


def stale(folder: Path) -> Iterator[str]:
    """Describe each figure of a folder in a Git checkout whose paths hold other code now, or may."""
    (head,) = _git(folder, "rev-parse", "HEAD")  # not HEAD itself: _code is cached
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        commit, _, uncommitted = report["commit"].partition(" ")
        paths = [f":/{name}" for name in (*benchmark_paths(report["command"]), *DEPENDENCIES[path.stem])]
        try:
            names = _git(folder, "diff", "--no-renames", "--name-only", commit, head, "--", *paths)
        except subprocess.CalledProcessError:
            yield f"{path.stem}: its commit {commit} is not in this clone's history"
            continue
        old_codes, new_codes = ({_code(folder, revision, name) for name in names} for revision in (commit, head))
        changed = [name for name in names if _code(folder, head, name) not in old_codes | {""}]
        if changed or old_codes - new_codes - {""}:
            where = [f":/{name}" for name in changed or names]
            last = _git(folder, "log", "-1", "--format=%h %s", f"{commit}..{head}", "--", *where)
            files = f"{changed[0]} and {len(changed) - 1} more" if changed[1:] else (changed or ["a file is gone"])[0]
            yield f"{path.stem}: other code since {commit[:8]}: {files}; the last commit: {last[0]}"
        elif uncommitted:
            yield f"{path.stem}: measured at {commit[:8]} {uncommitted}"


@functools.cache
def _code(folder: Path, commit: str, name: str) -> str:
    """Return what a file of a commit does, as text to compare; "" for one that is not there, or holds prose alone."""
    try:
        text = "\n".join(_git(folder, "show", f"{commit}:{name}"))
    except subprocess.CalledProcessError:
        return ""
    if name.endswith(".md"):
        return ""
    return code(text) if name.endswith(".py") else text


def code(text: str) -> str:
    """Return a Python file's code without what computes nothing: see the head of this file."""
    return ast.dump(_Bare().visit(ast.parse(text)))


class _Bare(ast.NodeTransformer):
    """Drops docstrings, annotations and imports, and numbers the local variables of functions."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        """Drop it, as modules move."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Drop it, as modules move."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Keep which error is raised, without its text."""
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ast.Raise(exc=self.visit(error) if error is not None else None, cause=None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Keep the field of a class, without its type."""
        value = self.visit(node.value) if node.value is not None else None
        return ast.AnnAssign(target=self.visit(node.target), annotation=ast.Constant(None), value=value, simple=0)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        outer_names = self._names
        declared = {
            name for part in ast.walk(node) if isinstance(part, ast.Global | ast.Nonlocal) for name in part.names
        }
        names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
        local_names = [name for name in dict.fromkeys(names) if name not in declared and name not in outer_names]
        self._names = outer_names | {name: f"local {len(outer_names) + i}" for i, name in enumerate(local_names)}
        self.generic_visit(node)
        self._names = outer_names
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)


def benchmark_paths(command: str) -> list[str]:
    """Return the file or package of the benchmark that a command `python -m benchmarks.NAME` runs, and its modules.

    These are the modules of `benchmarks` that it imports, save `report`, which measures nothing.
    """
    path = Path(command.split()[2].replace(".", "/"))
    paths = [str(path if path.joinpath("__main__.py").exists() else path.with_suffix(".py"))]
    for name in paths:  # it grows
        files = Path(name).rglob("*.py") if Path(name).is_dir() else [Path(name)]
        imports = {match[1] or match[2] for file in files for match in _IMPORT.finditer(file.read_text())}
        modules = (f"benchmarks/{module}.py" for module in sorted(imports - {"report"}))
        paths += [module for module in modules if module not in paths and Path(module).exists()]
    return paths


def _git(folder: Path, *words: str) -> Sequence[str]:
    """Return the lines that a Git command prints."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
