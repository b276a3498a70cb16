"""Find figures whose measured code has changed since.

    python -m tools.figures --stale

A figure's file states the commit that was measured. It is stale if the code of its benchmark, or of a path that the
figure depends on, computes something else now. Python files are compared as `python_code` reads them, so prose,
annotations, names of local variables, moved files and imports of code that moved unchanged make no figure stale.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.python_code import Code, definition, read_code


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"forge_rl/{folder}/{name}.py" for name in names)


_PASSES = _files(
    "engines/titan",
    *("cpu_attention", "cpu_feed_forward", "cpu_norm", "gradient_sums", "head", "linear", "masks", "measures"),
    *("model", "rope", "rows", "scoring", "small_adamw", "train", "update"),
)
"""A trainer's passes and updates on CPU: without loading, saving, exports, adapters and a GPU's kernels."""
_EXPERTS = _files("engines/titan", "expert_rows", "least_loaded", "moe", "routing")
_GENERAL = _files("engines/titan", "general_attention", "general_model", "general_routing", "general_state")
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
    *_files(
        "weights", "fingerprints", "kernels", "line_loops", "manifest", "names", "segment", "slices", "stacks", "volume"
    ),
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
    "gpu": (
        *_PASSES,
        *_KERNELS,
        *_DECODING,
        *_files("engines/vllm", "slicing", "stack_loaders", "transfer"),
        *_VERSIONS,
    ),
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
        *_GENERAL,
        *("forge_rl/engines/families", "forge_rl/packing", "tests/zoo"),
    ),
    "modelling_memory": (
        *(*_PASSES, *_EXPERTS, *_GENERAL),
        *("forge_rl/engines/families", "forge_rl/packing"),
    ),
    "models_native": (*_PASSES, *_EXPERTS, "forge_rl/engines/families", "forge_rl/packing"),
    "numerics": (*_PASSES, *_DECODING, "forge_rl/engines/vllm/prompt_scores.py"),
    "overhead": (
        *_SCHEDULE,
        *_files("rollout", "episode_runner", "tally"),
        *_files("runtime", "actor", "link", "replica", "service"),
        *_files("services", "environment", "environment_actor", "generator", "reward"),
        *("forge_rl/metrics", "forge_rl/packing"),
    ),
    "parsers": (
        *_files("tokens", "call_ids", "message_form", "parser_choice", "thoughts", "tokenizer", "tool_parsers"),
        *_files("tokens", "tool_text", "turn_ends"),
        *(f"tests/{name}.py" for name in ("chat_formats", "chat_templates", "chatml_formats", "vendor_formats")),
    ),
    "prefix_states": (
        *(*_PASSES, *_GENERAL, "forge_rl/engines/titan/row_states.py", "forge_rl/engines/families"),
        *("forge_rl/packing", "tests/zoo/folders.py", "tests/zoo/general.py"),
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
    "weights_model": (*_VERSIONS, *_files("engines/vllm", "internals", "slicing", "stack_loaders", "transfer")),
}
"""Paths, besides the benchmark itself, whose changes may move a figure; by the name of the figure's file."""

_IMPORT = re.compile(r"^ *from benchmarks(?:\.(\w+)| import (\w+))", re.MULTILINE)
_ORIGIN = re.compile(r"[\w.]+:\w*")


def stale(folder: Path) -> Iterator[str]:
    """Describe each figure of a folder in a Git checkout whose code has changed since, or may have."""
    (head,) = _git(folder, "rev-parse", "HEAD")
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        commit, _, uncommitted = report["commit"].partition(" ")
        paths = (*benchmark_paths(report["command"]), *DEPENDENCIES[path.stem])
        try:
            comparison = _Comparison(folder, commit, head)
        except subprocess.CalledProcessError:
            yield f"{path.stem}: its commit {commit} is not in this clone's history"
            continue
        if changed := comparison.changed(paths):
            last = _git(folder, "log", "-1", "--format=%h %s", f"{commit}..{head}", "--", *(f":/{n}" for n in changed))
            files = f"{changed[0]} and {len(changed) - 1} more" if changed[1:] else changed[0]
            yield f"{path.stem}: other code since {commit[:8]}: {files}; the last commit: {last[0]}"
        elif uncommitted:
            yield f"{path.stem}: measured at {commit[:8]} {uncommitted}"


class _Comparison:
    """Compares the code of two commits.

    Args:
        folder: a folder of the checkout.

    Raises:
        subprocess.CalledProcessError: a commit is not in the checkout.
    """

    def __init__(self, folder: Path, old: str, new: str) -> None:
        self._folder, self._old, self._new = folder, old, new
        self._pairs: dict[str, tuple[str, str]] = {}
        """Old and new name of each changed file, keyed by both if it moved; "" in a commit without the file."""
        for line in _git(folder, "diff", "--find-renames=40%", "-l0", "--name-status", old, new):
            status, *names = line.split("\t")
            pair = ("" if status == "A" else names[0], "" if status == "D" else names[-1])
            self._pairs |= dict.fromkeys(names, pair)

    def changed(self, paths: Sequence[str]) -> list[str]:
        """Return the files at or below the paths whose code computes something else now, or is gone."""
        names = [name for name in self._pairs if any(f"{name}/".startswith(f"{path}/") for path in paths)]
        return [name for name in names if not name.endswith(".md") and not self._is_same(*self._pairs[name])]

    def _is_same(self, old_name: str, new_name: str) -> bool:
        """Return whether a file of the old commit computes what one of the new commit does; "" computes nothing."""
        old_text = _text(self._folder, self._old, old_name) if old_name else ""
        new_text = _text(self._folder, self._new, new_name) if new_name else ""
        if old_text == new_text or old_text is None or new_text is None:
            return old_text == new_text
        if not all(name.endswith(".py") for name in (old_name, new_name) if name):
            return False
        old_code, new_code = _code(old_text, old_name), _code(new_text, new_name)
        if old_code is None or new_code is None or old_code.text != new_code.text:
            return False
        origins = itertools.zip_longest(old_code.origins, new_code.origins, fillvalue="")
        return all(old == new or self._is_same_import(old, new) for old, new in {*origins})

    def _is_same_import(self, old: str, new: str) -> bool:
        """Return whether something is imported from elsewhere, but defined by the same code there."""
        old_code = self._definition(self._old, old)
        return old_code is not None and old_code == self._definition(self._new, new)

    def _definition(self, commit: str, origin: str, hops: int = 5) -> str | None:
        """Return the code that defines an imported name; modules that only import it from elsewhere are followed."""
        module, _, name = origin.partition(":")
        for file in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
            text = _text(self._folder, commit, file)
            if text is not None and name and hops:
                code = definition(text, name, _module(file))
                is_passed_on = code is not None and _ORIGIN.fullmatch(code)
                return self._definition(commit, str(code), hops - 1) if is_passed_on else code
        return None


@functools.cache
def _text(folder: Path, commit: str, name: str) -> str | None:
    """Return the text of a file in a commit; None if the commit has no such file."""
    command = ["git", "-C", str(folder), "show", f"{commit}:{name}"]
    result = subprocess.run(command, capture_output=True, check=False)
    return None if result.returncode else result.stdout.decode(errors="surrogateescape")


@functools.cache
def _code(text: str, name: str) -> Code | None:
    """Return what a Python file computes; None if it is not Python."""
    try:
        return read_code(text, _module(name))
    except SyntaxError:
        return None


def _module(name: str) -> str:
    """Return the dotted module name of a file; a package's `__init__.py` keeps its last part, `__init__`."""
    return name.removesuffix(".py").replace("/", ".")


def benchmark_paths(command: str) -> list[str]:
    """Return the file or package of the benchmark that a command `python -m benchmarks.NAME` runs, and its modules.

    These are the modules of `benchmarks` that it imports, save `report`, which measures nothing.
    """
    path = Path(command.split()[2].replace(".", "/"))
    paths = [str(path if path.joinpath("__main__.py").exists() else path.with_suffix(".py"))]
    for name in paths:  # it grows
        files = Path(name).rglob("*.py") if Path(name).is_dir() else [Path(name)] * Path(name).is_file()
        imports = {match[1] or match[2] for file in files for match in _IMPORT.finditer(file.read_text())}
        modules = (f"benchmarks/{module}.py" for module in sorted(imports - {"report"}))
        paths += [module for module in modules if module not in paths and Path(module).exists()]
    return paths


def _git(folder: Path, *words: str) -> Sequence[str]:
    """Return the lines that a Git command prints."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
