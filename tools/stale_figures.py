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
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "answers": ("forge_rl/rewards",),
    "chaos": ("forge_rl/sandbox", "forge_rl/envs"),
    "chaos_images": ("forge_rl/sandbox", "benchmarks/chaos_images.py"),
    "chaos_process": ("forge_rl/sandbox", "forge_rl/envs"),
    "chaos_strict": ("forge_rl/sandbox", "forge_rl/envs"),
    "conformance": ("forge_rl/algorithms", "forge_rl/packing"),
    "containers": ("forge_rl/sandbox",),
    "data": ("forge_rl/data",),
    "demo": ("forge_rl/algorithms", "forge_rl/engines", "forge_rl/packing", "forge_rl/rollout", "recipes/grpo.py"),
    "evaluation": ("forge_rl/rollout", "forge_rl/run/evaluation/evaluator.py"),
    "expert_parallel": ("forge_rl/engines/titan/least_loaded.py", "forge_rl/engines/titan/moe.py"),
    "forecast": ("forge_rl/engines/costs.py", "forge_rl/forecast/roofline.py", "forge_rl/forecast/search.py"),
    "gateway": ("forge_rl/gateway", "forge_rl/services/generator.py"),
    "gpu": ("forge_rl/engines", "forge_rl/weights"),
    "grpo_step": ("forge_rl/algorithms", "forge_rl/engines", "forge_rl/packing"),
    "host_deaths": ("forge_rl/runtime",),
    "hosts": ("forge_rl/weights", "forge_rl/services/weight_store.py"),
    "layouts": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/packing"),
    "long_rows": ("forge_rl/engines/titan", "forge_rl/engines/costs.py"),
    "long_run": ("forge_rl/metrics", "forge_rl/rollout", "forge_rl/runtime/processes.py"),
    "methods": ("forge_rl/algorithms", "forge_rl/packing"),
    "models": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/packing", "tests/zoo"),
    "models_native": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/packing"),
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
    "update_cost": ("forge_rl/engines/titan", "forge_rl/engines/families", "forge_rl/algorithms/logprobs.py"),
    "weights": ("forge_rl/weights", "forge_rl/services/weight_store.py"),
    "weights_model": ("forge_rl/weights", "forge_rl/services/weight_store.py", "forge_rl/engines/vllm/transfer.py"),
}
"""Paths, besides the benchmark itself, whose changes may move a figure; by the name of the figure's file."""


def stale(folder: Path) -> Iterator[str]:
    """Describe each figure of a folder in a Git checkout whose paths hold other code now, or may."""
    (head,) = _git(folder, "rev-parse", "HEAD")  # not HEAD itself: _code is cached
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        commit, _, uncommitted = report["commit"].partition(" ")
        paths = [f":/{name}" for name in (benchmark_path(report["command"]), *DEPENDENCIES[path.stem])]
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


def benchmark_path(command: str) -> str:
    """Return the file or package of the benchmark that a command `python -m benchmarks.NAME` runs."""
    path = Path(command.split()[2].replace(".", "/"))
    return str(path if path.joinpath("__main__.py").exists() else path.with_suffix(".py"))


def _git(folder: Path, *words: str) -> Sequence[str]:
    """Return the lines that a Git command prints."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
