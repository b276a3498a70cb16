"""The wheel: what it holds, its command, and that it works where nothing of the repository is."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.commands import metrics

ROOT = Path(__file__).parent.parent
RECIPES = [path.stem.replace("_", "-") for path in sorted((ROOT / "recipes").glob("[a-z]*.py"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from a copy of the sources, as building leaves files beside them."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("forge_rl", "recipes", "apps", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", out, copy], check=True)
    (wheel_file,) = out.glob("*.whl")
    return wheel_file


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def forge_rl(unpacked: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `forge-rl` in a folder, with the wheel's code and none of the repository's."""
    command = [sys.executable, "-c", "import sys; from forge_rl.cli import main; sys.exit(main())", *args]
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_wheel_holds_forge_rl_alone_with_recipes_and_apps(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "forge-rl = forge_rl.cli:main" in archive.read(entries).decode()
    sources = [path for suffix in ("py", "pyi") for path in (ROOT / "forge_rl").rglob(f"*.{suffix}")]
    expected = {str(path.relative_to(ROOT)) for path in sources} | {"forge_rl/py.typed"}
    expected.add("forge_rl/forecast/version_costs.json")
    assets = ROOT / "forge_rl" / "look" / "page" / "assets"
    expected |= {str(path.relative_to(ROOT)) for path in assets.rglob("*") if path.is_file()}
    for place in ("recipes", "recipes/agents", "apps"):
        expected |= {f"forge_rl/{place}/{path.name}" for path in (ROOT / place).glob("*.py")}
    assert names == expected


def test_apps_and_recipes_import_each_other_relatively():
    """In a wheel they are packages of forge_rl, and no module is called apps or recipes."""
    for path in (*(ROOT / "apps").glob("*.py"), *(ROOT / "recipes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & {"apps", "recipes"}, f"{path}:{names}"


def test_the_command_lists_recipes_and_apps_and_says_its_version(unpacked: Path, tmp_path: Path):
    help_text = forge_rl(unpacked, tmp_path, "--help").stdout
    assert "GRPO: group-relative policy optimisation" in help_text
    for name in ("agent-openai", "gateway", "grpo", "new"):
        assert re.search(rf"^    {name}\s", help_text, re.MULTILINE)
    assert forge_rl(unpacked, tmp_path, "--version").stdout.startswith("forge_rl 0.")
    shown_of_grpo = forge_rl(unpacked, tmp_path, "grpo", "--help")
    assert "usage: forge-rl grpo" in shown_of_grpo.stdout
    assert not shown_of_grpo.stderr, "help starts nothing, and says nothing of what takes long"
    wrong = forge_rl(unpacked, tmp_path, "mixture", "--stps", "3")
    assert wrong.stderr.startswith("loading torch and Monarch takes"), "its first line comes before they load"
    assert wrong.returncode == 2


def test_a_new_recipe_is_the_template_and_runs_as_it_is(unpacked: Path, tmp_path: Path):
    done = forge_rl(unpacked, tmp_path, "new", "my_recipe.py", "--from", "grpo")
    assert done.stdout == "wrote my_recipe.py; edit it, and run it with: python my_recipe.py --help\n"
    lines = (tmp_path / "my_recipe.py").read_text().splitlines()
    template = (ROOT / "recipes" / "grpo.py").read_text().splitlines()
    assert [(a, b) for a, b in zip(lines, template, strict=True) if a != b] == [
        ("python my_recipe.py --help", "python -m recipes.grpo --help")
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_copied_to_an_empty_folder_works_by_itself(recipe: str, unpacked: Path, tmp_path: Path):
    done = forge_rl(unpacked, tmp_path, "new", "mine.py", "--from", recipe)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    dumping = [sys.executable, "mine.py", "--dump-config"]
    process = subprocess.run(dumping, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not process.stderr
    assert process.stdout.startswith("# python mine.py --config FILE reads this")
    config = tomllib.loads(process.stdout)
    assert config["steps"]
    if "command" in config:
        agent = Path(shlex.split(config["command"])[1])
        assert agent == tmp_path / "agents" / "ask_twice.py"
        assert agent.read_text() == (ROOT / "recipes" / "agents" / "ask_twice.py").read_text()


@pytest.mark.parametrize("program", ["recipes.grpo", "recipes.agent_openai", "apps.data"])
def test_outside_of_the_environment_a_program_says_what_to_do(program: str):
    command = [sys.executable, "-S", "-m", program, "--help"]  # -S: without what is installed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == (
        "error: this Python lacks what forge_rl needs\n  hint: source .venv/bin/activate, or first: make setup\n"
    )
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("new", "kept.py"), "kept.py exists\n  hint: choose another name, or add --force to overwrite it"),
        (("new", "recipe.txt"), "recipe.txt is not a Python file"),
        (
            ("new", "mine.py", "--from", "nonsense"),
            "there is no recipe 'nonsense'\n  hint: recipes: adapters, agent-command",
        ),
        (("new", "missing/mine.py"), "missing/mine.py cannot be written: No such file or directory"),
        (("new", "mine.py", "--from", "agent-command"), "agents/ask_twice.py cannot be written: File exists"),
        (("grop",), "there is no command 'grop'\n  hint: did you mean grpo? commands: adapters, agent-command"),
        ((), "required: COMMAND"),
    ],
)
def test_a_wrong_command_is_one_clear_message(unpacked: Path, tmp_path: Path, args: tuple[str, ...], message: str):
    (tmp_path / "kept.py").write_text("mine")
    (tmp_path / "agents").write_text("a file where the recipe expects a folder")
    done = forge_rl(unpacked, tmp_path, *args)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
    assert (tmp_path / "kept.py").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agents", "kept.py"], "nothing half is left"


@pytest.mark.parametrize(
    "program",
    [
        "class Names(dict):\n    def __getitem__(self, name):\n        raise KeyboardInterrupt\n\n"
        "import forge_rl\nforge_rl._NAMES = Names(Run=1)\nforge_rl.Run",
        "def load(name):\n    raise KeyboardInterrupt\n\nimport importlib\nfrom forge_rl import cli\n"
        "cli.commands = lambda: {'show': 'apps.show'}\nimportlib.import_module = load\ncli.main(['show'])",
    ],
)
def test_ctrl_c_while_a_program_loads_ends_it_without_a_traceback(program: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "stopped by Ctrl-C"
    assert "Traceback" not in done.stderr
    assert done.returncode == 130


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_wheel_trains_by_its_command_and_by_a_copied_recipe(wheel: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def run(*command: str | Path) -> None:
        # A user's Python keeps what it compiles; without, each process would compile all that it imports.
        left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    empty, environment = tmp_path / "empty", tmp_path / "environment"
    empty.mkdir()
    uv, pins = Path(sys.executable).with_name("uv"), ROOT / "requirements"
    run(uv, "venv", "-q", "-p", sys.executable, environment)
    where = ["--find-links", links] if (links := os.environ.get("PIP_FIND_LINKS")) else ["--torch-backend", "cpu"]
    install = [uv, "pip", "install", "-q", "--python", environment, "--constraints", pins / "constraints-cpu.txt"]
    run(*install, "--require-hashes", "--no-deps", *where, "-r", pins / "overrides-cpu.txt")
    run(*install, "--overrides", pins / "overrides-cpu.txt", f"forge_rl[cpu] @ {wheel.as_uri()}")
    flags = [
        "--steps",
        "1",
        "--groups-per-batch",
        "4",
        "--group-size",
        "8",  # so that not all groups of the step are uniform, which train nothing
        "--evaluation.every",
        "0",
        "--display",
        "plain",
    ]
    run(environment / "bin" / "forge-rl", "grpo", *flags, "--out", "by-command")
    run(environment / "bin" / "forge-rl", "new", "mine.py", "--from", "grpo")
    run(environment / "bin" / "python", "mine.py", *flags, "--out", "by-file")
    for name in ("by-command", "by-file"):
        assert (empty / name / "summary.json").is_file()
        (row,) = metrics(empty / name)
        assert row["logprob_gap"] <= 1e-4, "the bundled model's, between trainer and engine"
        folder = empty / name / "checkpoints" / "step-000001" / "model"
        prompt = AutoTokenizer.from_pretrained(folder)("2 + 2 =", return_tensors="pt")
        assert AutoModelForCausalLM.from_pretrained(folder)(**prompt).logits.isfinite().all()
