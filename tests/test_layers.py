"""The house's layers: imports point only to the left, and each outer library is touched in few places.

Read from the imports in the source, those inside functions and under TYPE_CHECKING too.
"""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WINGS = ("sandbox", "gateway", "worlds", "jobs", "look", "harness", "forecast", "tinker")
"""Packages with a front door each, loaded only by name. All but the sandbox, which is below, are right of the core."""

STAGES = (
    ("forge_rl.system.terminal",),
    ("forge_rl.token_arrays", "forge_rl.errors"),
    ("forge_rl.types", "forge_rl.criteria"),
    ("forge_rl.system",),
    ("forge_rl.sandbox",),
    ("forge_rl.flags",),
    ("forge_rl.models",),
    ("forge_rl.tokens",),
    (
        "forge_rl.algorithms",
        "forge_rl.data",
        "forge_rl.packing",
        "forge_rl.envs",
        "forge_rl.rewards",
        "forge_rl.metrics",
    ),
    ("forge_rl.runtime", "forge_rl.weights"),
    ("forge_rl.engines",),
    ("forge_rl.services",),
    ("forge_rl.rollout",),
    (
        *("forge_rl.run.target", "forge_rl.run.placement_flag", "forge_rl.run.endpoints", "forge_rl.run.first_line"),
        *("forge_rl.run.service_set", "forge_rl.run.run_models", "forge_rl.run.lora_settings"),
        "forge_rl.run.effects",
    ),
    ("forge_rl.run.run_config",),
    ("forge_rl.run.example_config", "forge_rl.run.task_config"),
    ("forge_rl.run.records", "forge_rl.run.plan"),
    ("forge_rl.run.live", "forge_rl.run.evaluation"),
    ("forge_rl.run.checkpoints",),
    ("forge_rl.run.adapters",),
    ("forge_rl.run.run",),
    ("forge_rl.run.live.control",),  # which serves a whole run to others
    ("forge_rl.run.start",),
    ("forge_rl.run.launch",),
    ("forge_rl.run",),
    tuple(f"forge_rl.{wing}" for wing in WINGS if wing not in ("sandbox", "tinker")),
    ("forge_rl.tinker",),  # which serves by the gateway's HTTP server and guard
    ("forge_rl", "forge_rl.cli"),
    ("forge_rl.__main__",),
    ("recipes", "apps", "benchmarks"),
)
"""Left to right. A package may import from stages to its left and from itself, not from its neighbours."""

ONLY_IN = {
    "monarch": ("forge_rl.runtime", "forge_rl.services", "forge_rl.weights", "forge_rl.jobs"),
    "torchtitan": ("forge_rl.engines.titan", "forge_rl.engines.families"),
    "torch.distributed": ("forge_rl.engines.titan", "forge_rl.engines.platform", "forge_rl.engines.cpu"),
    "vllm": ("forge_rl.engines.vllm", "forge_rl.gateway.vllm_internals", "forge_rl.tokens.vllm_parsers"),
    "torchstore": ("forge_rl.weights.transports",),
    "os.environ": (
        *(
            "forge_rl.system.variables",
            "forge_rl.runtime.children",
            "forge_rl.runtime.cluster",
            "forge_rl.runtime.monarch_log",
        ),
        *("forge_rl.runtime.private_network", "forge_rl.engines.cpu"),
        *("forge_rl.runtime.fork_client", "forge_rl.runtime.fork_server"),  # of the processes that are forked
        *("forge_rl.jobs.allocation", "forge_rl.jobs.host"),  # the scheduler's; its own
        "forge_rl.jobs.worker",
        *(
            "forge_rl.sandbox.inside.cells",
            "forge_rl.sandbox.workspaces.tests_outside",
            "forge_rl.sandbox.inside.server",
        ),  # of the session's own processes
        *("apps", "recipes.agents"),
    ),
    "os.getenv": ("forge_rl.runtime.cluster", "apps"),
    "os.putenv": (),
    "asyncio.wait_for": (),  # until Python 3.12, it forgets a cancellation at the moment at which what it awaits ends
    "asyncio.TaskGroup": ("forge_rl.system.tasks",),  # which counts failures as cancellations of its parent
}
"""Who may touch what. Benchmarks may import anything: they measure it."""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def stage_of(module: str) -> tuple[int, str] | None:
    """The stage of a module and the longest package of STAGES that it is in; None if it is not ours."""
    homes = [(len(home), stage, home) for stage, names in enumerate(STAGES) for home in names if within(module, home)]
    if not homes:
        return None
    _, stage, home = max(homes)
    return stage, home


@functools.cache  # several tests look at the imports of all modules, whose parsing takes seconds
def touched(source: str, package: str) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything that a source imports, and of every attribute that could be an outer one."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names += ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                names += ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Attribute() if (name := dotted(node)) in ONLY_IN:
                names.append((node.lineno, name))
    return tuple(names)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Imports that a module may not have."""
    stage = stage_of(module)
    assert stage is not None, f"{module} is in no stage"
    problems = []
    for line, name in touched(source, module if is_package else module.rpartition(".")[0]):
        imported_stage = stage_of(name)
        left = imported_stage is None or imported_stage[0] < stage[0] or imported_stage[1] == stage[1]
        # `from forge_rl import errors` names the submodule; `from forge_rl import Run` is the whole public face.
        if not left:
            problems.append(f"{module}:{line} imports {name}, which is not to the left of {stage[1]}")
        for outer, homes in ONLY_IN.items():
            if within(name, outer) and not any(within(module, home) for home in homes):
                if within(module, "benchmarks"):
                    continue
                problems.append(f"{module}:{line} touches {outer}, which only {', '.join(homes) or 'nobody'} may")
    return problems


def modules() -> Iterator[tuple[str, str, bool]]:
    """Name and source of every module of ours."""
    for top in ("forge_rl", "recipes", "apps", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if "peers" in relative.parts:  # scripts for the peers' own environments
                continue
            parts = relative.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield ".".join(parts[:-1] if is_package else parts), path.read_text(), is_package


def test_imports_point_only_to_the_left():
    checked = 0
    problems = []
    for name, source, is_package in modules():
        checked += 1
        problems += violations(name, source, is_package=is_package)
    assert not problems, "\n".join(problems)
    assert checked > 50


def wing_of(module: str) -> str:
    """The wing of a module, or "" for the core's and for what is right of all wings."""
    return next((wing for wing in WINGS if within(module, f"forge_rl.{wing}")), "")


def wings_touched(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Imports by which the core would depend on a wing, or a wing on another. Wings may import the sandbox, which is
    below them all, and the Tinker API's wing the gateway, by whose HTTP server and guard it serves."""
    wing, arrows = wing_of(module), []
    for line, name in touched(source, module if is_package else module.rpartition(".")[0]):
        imported_wing = wing_of(name)
        if (
            imported_wing not in ("", wing)
            and not (imported_wing == "sandbox" and wing)
            and (wing, imported_wing) != ("tinker", "gateway")
        ):
            arrows.append(f"{module}:{line} imports {name}, of the wing {imported_wing}")
        base = ("forge_rl.sandbox", "forge_rl.errors", "forge_rl.system")
        if wing == "sandbox" and within(name, "forge_rl") and not any(within(name, home) for home in base):
            arrows.append(f"{module}:{line} imports {name}: the sandbox is usable without the rest")
    return arrows


def test_the_core_imports_no_wing_and_a_wing_only_the_core_and_the_sandbox():
    """A wing is loaded by name where it is asked for: see `forge_rl.system.lazy`."""
    arrows = []
    for name, source, is_package in modules():
        if within(name, "forge_rl"):
            arrows += wings_touched(name, source, is_package=is_package)
    assert not arrows, "\n".join(arrows)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("forge_rl.rollout.executor", "from forge_rl.gateway.sessions import Session"),
        ("forge_rl.run.start.starting", "if TYPE_CHECKING:\n    from forge_rl.gateway import GatewayConfig"),
        ("forge_rl", "def f():\n    from forge_rl.forecast.search import search"),
        ("forge_rl.forecast.search", "from forge_rl.gateway.sessions import Session"),
        ("forge_rl.rewards.answers", "from forge_rl.sandbox import Pool"),
        ("forge_rl.sandbox.pool", "from forge_rl.flags.texts import parse"),
    ],
)
def test_an_import_of_a_wing_is_caught(module: str, source: str):
    assert len(wings_touched(module, source)) == 1


def test_every_name_that_is_loaded_late_leads_somewhere():
    places = re.compile(r'"(forge_rl(?:\.\w+)+):(\w+)"')
    names = {match.groups() for _, source, _ in modules() for match in places.finditer(source)}
    assert len(names) > 40
    for module, name in sorted(names):
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"


def test_no_two_modules_import_each_other_not_even_over_others():
    sources = {name: (source, is_package) for name, source, is_package in modules()}
    imports = {}
    for name, (source, is_package) in sources.items():
        module_imports = {imported for _, imported in touched(source, name if is_package else name.rpartition(".")[0])}
        # `from package import name` imports the module of that name, where there is one, else the package.
        homes = {imported if imported in sources else imported.rpartition(".")[0] for imported in module_imports}
        imports[name] = (homes & sources.keys()) - {name}
    order = graphlib.TopologicalSorter(imports)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")
    assert sum(map(len, imports.values())) > 300


def test_every_package_has_its_stage():
    packages = {f"forge_rl.{p.stem}" for p in (ROOT / "forge_rl").iterdir() if p.suffix in ("", ".py")}
    packages -= {"forge_rl.__init__", "forge_rl.__pycache__", "forge_rl.py"}
    assert packages == {
        name for names in STAGES for name in names if name.count(".") == 1 and name.startswith("forge_rl.")
    }


def test_shared_recipe_code_knows_no_loss_verifier_or_kind_of_data():
    recipes_own = ("forge_rl.rewards", "forge_rl.algorithms", "forge_rl.data.sources", "forge_rl.data.data_config")
    touches = {
        (module, name)
        for module, source, _ in modules()
        if within(module, "forge_rl.run")
        and module not in ("forge_rl.run.task_config", "forge_rl.run.example_config")  # the flags of most recipes
        for _, name in touched(source, "forge_rl.run")
        if any(within(name, recipe_module) for recipe_module in recipes_own)
    }
    assert touches == {
        ("forge_rl.run.start.starting", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.run", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.adapters", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.plan.memory", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.start.checks", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.start.setup", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.evaluation.example_evaluation", "forge_rl.algorithms.protocol.Loss"),
        ("forge_rl.run.start.starting", "forge_rl.algorithms.user_loss.try_loss"),  # whichever the recipe gives
        ("forge_rl.run.plan.memory", "forge_rl.algorithms.user_loss.try_loss"),
        ("forge_rl.run.plan.memory", "forge_rl.algorithms.loss_flag.build_loss"),  # which the config names
        ("forge_rl.run.start.preparation", "forge_rl.rewards.confinement.missing_confinement"),  # whichever the rewards
        ("forge_rl.run.start.setup", "forge_rl.rewards.peers.as_reward"),  # whichever form it has
        (
            "forge_rl.run.live.settings",
            "forge_rl.rewards.reward_flag.build_reward",
        ),  # one that is named while the run goes
        ("forge_rl.run.live.settings", "forge_rl.rewards.composition.described"),  # whichever it is, for the events
    }


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("forge_rl.errors", "import forge_rl.types"),  # a neighbour
        ("forge_rl.packing.rows", "from forge_rl.algorithms import Loss"),  # a neighbour
        ("forge_rl.weights.buckets", "from forge_rl.runtime.faults import Faults"),  # a neighbour
        ("forge_rl.algorithms.losses", "def f():\n    from forge_rl.engines import platform"),
        (
            "forge_rl.engines.optimizer",
            "if TYPE_CHECKING:\n    import forge_rl.services",
        ),
        ("forge_rl.services.trainer", "from forge_rl.run.run import Run"),
        ("forge_rl.services.trainer", "from ..run import run"),
        ("forge_rl.services.trainer", "from forge_rl import rollout"),
        ("forge_rl.services.trainer", "from forge_rl import Run"),
        ("forge_rl.run.run", "import recipes.grpo"),
        ("recipes.grpo", "import apps.chat"),
        ("forge_rl.run.run", "from monarch.actor import Actor"),
        ("forge_rl.engines.vllm", "import torchtitan.models"),
        ("forge_rl.packing.rows", "import torch.distributed as dist"),
        ("forge_rl.packing.rows", "from torch import distributed"),
        ("forge_rl.services.trainer", "def f():\n    import torch\n    return torch.distributed.get_rank()"),
        ("forge_rl.services.generator", "from vllm import SamplingParams"),
        ("forge_rl.tokens.tool_parsers", "from vllm import SamplingParams"),
        ("forge_rl.services.weight_store", "import torchstore"),
        ("forge_rl.engines.memory", "import os\nos.environ['A'] = 'b'"),
        ("forge_rl.engines.memory", "from os import environ"),
        ("recipes.grpo", "import os\nos.getenv('A')"),
        ("recipes.grpo", "import vllm"),
    ],
)
def test_a_violation_is_caught(module: str, source: str):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("forge_rl.packing.rows", "from forge_rl.errors import ConfigError\nfrom forge_rl.models.resolve import x"),
        ("forge_rl.engines.vllm", "from forge_rl.runtime.faults import Faults\nimport vllm"),
        ("forge_rl.engines.titan.train", "from .model import x\nimport torch.distributed as dist, torchtitan"),
        ("forge_rl.runtime.cluster", "import os\nos.environ\nfrom monarch.actor import Actor"),
        ("forge_rl.weights.transports.torchstore", "import torchstore, monarch"),
        ("forge_rl.weights.names", "from forge_rl.errors import CheckpointError"),
        ("recipes.grpo", "from forge_rl import Run\nfrom forge_rl.data.sources import Source"),
        ("apps.gateway", "import os\nos.environ['A']"),
        ("forge_rl.metrics.boards", "from torch.utils.tensorboard import SummaryWriter\nimport torchvision"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str):
    assert violations(module, source) == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_recipe_imports_forge_rl_under_one_name_and_nothing_else_of_ours(path: Path):
    names = {name for _, name in touched(path.read_text(), "recipes")}
    ours = {name for name in names if name.partition(".")[0] in {"forge_rl", "recipes", "apps", "benchmarks", "tests"}}
    assert ours == {"forge_rl"}


def test_importing_forge_rl_imports_nothing_heavy_and_sets_nothing():
    script = """
import os, sys, threading
before = dict(os.environ)
import forge_rl
heavy = {"torch", "monarch", "vllm", "torchtitan", "torchstore", "transformers", "numpy", "rich", "tyro"}
print(sorted(heavy & set(sys.modules)), dict(os.environ) == before, threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True 1"


def test_processes_that_hold_no_tensors_load_no_torch():
    script = """
import sys
import forge_rl.engines.protocol, forge_rl.services.environment, forge_rl.services.reward
import forge_rl.services.weight_store_actor
print(sorted({"torch", "transformers", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_can_be_imported():
    import forge_rl

    assert len(forge_rl.__all__) > 40
    assert set(forge_rl.__all__) < set(dir(forge_rl))  # what a prompt completes
    for name in forge_rl.__all__:
        assert getattr(forge_rl, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        forge_rl.nonsense  # noqa: B018
