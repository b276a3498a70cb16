"""Command lines: a config file that flags override, and help that shows what is asked for."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro

from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.flags.config_file import dump, read
from forge_rl.flags.fields import flags_of
from forge_rl.run.run_config import RunConfig

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "recipes").glob("[a-z]*.py"), *(ROOT / "apps").glob("[a-z]*.py")]
PROGRAMS = [f"{path.parent.name}.{path.stem}" for path in FILES]
LOOKING = (
    "apps.compare",
    "apps.dashboard",
    "apps.images",
    "apps.join",
    "apps.merge",
    "apps.push",
    "apps.report",
    "apps.runs",
    "apps.show",
)
"""Programs of a few flags, which nobody puts into a file."""
NEEDS = {"apps.evaluate": ["a-model"], "apps.openenv_serve": ["game"]}
SEEDLESS = {"apps.openenv_serve": "--port", "apps.sandbox": "--port", "apps.doctor": "--model"}
"""Programs without a seed, and a flag that they have instead."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine."""

    slots: int = 4
    """Slots. There are as many as this says."""
    length: int = 8
    """Longest text."""
    rate: float | None = None
    """Rate."""
    workers: int = 1
    """Workers, raised to one for four slots."""

    def __post_init__(self) -> None:
        if self.slots > self.length:
            raise ConfigError(f"--engine.slots is {self.slots}", hint="lower it")
        object.__setattr__(self, "workers", max(self.workers, self.slots // 4))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Do something."""

    steps: int = 10
    """Number of steps."""
    tasks: tuple[str, ...] = ("a",)
    """Tasks."""
    kind: Literal["fast", "slow"] = "fast"
    """Kind."""
    out: Path | None = None
    """Folder."""
    engine: Engine = field(default_factory=lambda: Engine(length=9))


def parsed(*args: str) -> Config:
    return parse(Config, "prog", args)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_a_file_sets_any_part_and_the_command_line_wins(file: Path) -> None:
    file.write_text('steps = 3\ntasks = ["b", "c"]\nout = "here"\n[engine]\nslots = 5\n')
    assert parsed("--config", str(file)) == Config(
        steps=3, tasks=("b", "c"), out=Path("here"), engine=Engine(slots=5, length=9)
    )
    config = parsed("--steps", "4", f"--config={file}", "--tasks", "d", "--engine.length", "7")
    assert config == Config(steps=4, tasks=("d",), out=Path("here"), engine=Engine(slots=5, length=7))


def test_values_are_checked_once_file_and_command_line_are_joined(file: Path) -> None:
    file.write_text("[engine]\nslots = 20\n")
    with pytest.raises(ConfigError, match=r"--engine\.slots is 20"):
        parsed("--config", str(file))
    config = parsed("--config", str(file), "--engine.slots", "8")
    assert config.engine.workers == 2, "derived from the value that counts, not from the file's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stps = 3", r"run.toml:1: stps is unknown\n  hint: did you mean steps\? keys here: engine, kind"),
        ("steps = 1\nslots = 3", r"run.toml:2: slots is unknown\n  hint: did you mean engine.slots\?"),
        ('# x\n[engine]\n\nslots = "many"', r"run.toml:4: engine.slots is 'many'\n  hint: input should be a valid int"),
        ("steps = 1.5", r"run.toml:1: steps is 1.5"),
        ("steps = true", r"run.toml:1: steps is True"),
        ('kind = "slower"', r"run.toml:1: kind is 'slower'\n  hint: input should be 'fast' or 'slow'"),
        ('tasks = "a"', r"run.toml:1: tasks is 'a'\n  hint: input should be a valid array"),
        ("engine = 3", r"run.toml:1: engine is 3\n  hint: write it as a table, \[engine\]"),
        ("engine.slot = 3", r"run.toml:1: engine.slot is unknown\n  hint: did you mean slots"),
        ("steps = \n", r"run.toml is not TOML: .*line 1"),
        (f"steps = {'[' * 100_000}", r"run.toml is not TOML: "),
    ],
)
def test_a_wrong_file_is_one_clear_message(text: str, message: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parsed("--config", str(file))


def test_retired_flags_are_accepted_only_at_their_defaults(file: Path) -> None:
    file.write_text("[generator.restart]\nmax_restarts = 4\nbackoff_s = 1.0\npause_s = 300.0\n")
    assert read(file, RunConfig).generator.restart.max_restarts == 4
    file.write_text("[generator.restart]\nbackoff_s = 2.0\n")
    with pytest.raises(ConfigError, match=r"\.toml:2: generator\.restart\.backoff_s is no longer a flag") as raised:
        read(file, RunConfig)
    assert "it is always 1.0" in raised.value.hint
    with pytest.raises(ConfigError, match=r"--generator\.restart\.pause-s is no longer a flag"):
        parse(RunConfig, "grpo", ["--generator.restart.pause-s", "9"])


def test_renamed_flags_are_read_by_their_old_names(file: Path) -> None:
    file.write_text("[generator]\nreplicas = 2\nleast_replicas = 1\n")
    flags = ["--environment.most-replicas=3", "--generator.most-replicas", "4"]
    config = parse(RunConfig, "grpo", ["--config", str(file), *flags])
    assert (config.generator.min_replicas, config.generator.max_replicas) == (1, 4)
    assert config.environment.max_replicas == 3


def test_one_flag_by_its_old_and_its_new_name_is_refused(file: Path) -> None:
    file.write_text("[generator]\nmin_replicas = 2\nleast_replicas = 1\n")
    message = r"\.toml:3: generator\.least_replicas is the old name of generator\.min_replicas, which is set too"
    with pytest.raises(ConfigError, match=message):
        read(file, RunConfig)
    flags = ["--generator.min-replicas", "2", "--generator.least-replicas=1"]
    for words in (flags, flags[::-1][:1] + flags[:2]):
        with pytest.raises(
            ConfigError, match=r"(min|least)-replicas and --generator\.(min|least)-replicas are one flag"
        ):
            parse(RunConfig, "grpo", words)
    file.write_text("[generator]\nleast_replicas = 1\n")
    config = parse(RunConfig, "grpo", ["--config", str(file), "--generator.min-replicas", "0"])
    assert config.generator.min_replicas == 0, "the command line overrides the file"


def test_a_file_that_is_not_there_is_one_clear_message() -> None:
    with pytest.raises(ConfigError, match=r"--config gone\.toml: No such file"):
        parsed("--config", "gone.toml")


def test_a_second_file_is_not_silently_taken_for_the_first(file: Path) -> None:
    file.write_text("steps = 3\n")
    with pytest.raises(ConfigError, match=f"--config is given twice, the second time with {file}"):
        parsed("--config", str(file), f"--config={file}")


def test_odd_values_come_back(file: Path) -> None:
    config = Config(tasks=('quote " back \\ \x7f é 😀\nline', ""), out=None, engine=Engine(rate=float("inf"), slots=1))
    file.write_text(dump(config))
    assert parsed("--config", str(file)) == config
    file.write_text('out = "None"\n[engine]\nrate = "None"\n')
    assert parsed("--config", str(file)) == Config()


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in LOOKING])
def test_what_dump_config_prints_is_read_back_as_the_same_config(
    program: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: Any = importlib.import_module(program).Config
    flags = [*NEEDS.get(program, []), SEEDLESS.get(program, "--seed"), "7"]
    with pytest.raises(SystemExit) as ended:
        parse(kind, program, [*flags, "--dump-config"])
    assert ended.value.code == 0
    file.write_text(capsys.readouterr().out)
    assert parse(kind, program, ["--config", str(file)]) == parse(kind, program, flags)
    assert file.read_text().count("\n# ") > 5


def helped(kind: type, *args: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(kind, "prog", args)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_short_a_group_is_whole_and_every_flag_is_explained(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: Any = importlib.import_module(program).Config
    short, everything = (helped(kind, flag, capsys=capsys) for flag in ("--help", "--help-all"))
    flags = re.findall(r"^  (?:--)?([\w.-]+)", short, re.MULTILINE)
    assert len(flags) <= 30
    assert len(short.splitlines()) < 120
    listed = re.findall(r"^  (?:--)?([\w.-]+)", everything, re.MULTILINE)
    assert set(flags) < set(listed) or program in (*LOOKING, "apps.doctor")
    assert all(len(flag.text.split()) > 1 for flag in flags_of(kind))
    if hasattr(kind, "generator"):
        help_text = helped(kind, "--help", "generator", capsys=capsys)
        assert helped(kind, "--help=generator", capsys=capsys) == help_text
        assert {name for name in listed if name.startswith("generator.")} == set(
            re.findall(r"^  --([\w.-]+)", help_text, re.MULTILINE)
        )


def test_help_loads_no_torch() -> None:
    script = "import sys, recipes.grpo as grpo, forge_rl.flags.command_line as c\n"
    script += "try: c.parse(grpo.Config, 'grpo', ['--help'])\n"
    script += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_a_group_that_is_not_there_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no group of flags 'engin'\n  hint: did you mean engine\?"):
        parsed("--help", "engin")
    assert "--engine.rate FLOAT" in helped(Config, "--help", "engine", capsys=capsys)
    assert "Slots." in helped(Config, "--help", "engine.slots", capsys=capsys)


def test_positional_arguments_can_be_in_the_file(file: Path) -> None:
    @dataclass(frozen=True)
    class Named:
        names: tyro.conf.Positional[tuple[str, ...]]
        """Names."""

    file.write_text('names = ["a", "b"]')
    globals()["Named"] = Named
    assert parse(Named, "prog", ["--config", str(file)]) == Named(("a", "b"))
    assert parse(Named, "prog", ["--config", str(file), "c"]) == Named(("c",))


def test_a_file_is_not_a_config_until_flags_are_joined(file: Path) -> None:
    file.write_text("steps = 2\n")
    assert read(file, Config).engine == Engine(length=9)


FOREIGN = {"--force", "--me", "--quiet", "--shm-size"}
"""Flags of `forge-rl new`, squeue, a user's alert command and docker, which hints name too."""


def named_flags(path: Path) -> set[str]:
    """Flags that the hints, errors and advisories of a file name."""
    texts: list[ast.AST] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            texts.append(node.value)
        elif (isinstance(node, ast.Raise) and node.exc) or path.name == "advisories.py":
            texts.append(node)
    constants = [constant for text in texts for constant in ast.walk(text) if isinstance(constant, ast.Constant)]
    names = (name for constant in constants for name in re.findall(r"(?<![\w-])--[a-z][\w.-]*", str(constant.value)))
    return {name.rstrip(".,") for name in names}


def test_every_flag_that_a_hint_or_an_advisory_names_exists() -> None:
    known_flags = {"--config", "--dump-config", "--help", "--help-all", *FOREIGN}
    known_flags |= {flag.name for name in PROGRAMS for flag in flags_of(importlib.import_module(name).Config)}
    paths = [*(ROOT / "forge_rl").rglob("*.py"), *FILES]
    named = {name: path.name for path in paths for name in named_flags(path)}
    assert len(named) > 100, "the texts are found"
    begun = [name for name in named if name.endswith("-")]  # a text that continues, "--gateway.session-{...}"
    assert all(any(flag.startswith(name) for flag in known_flags) for name in begun), begun
    wrong = {name: path for name, path in named.items() if name not in known_flags and name not in begun}
    assert wrong == {}
