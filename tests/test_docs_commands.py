"""Commands and flags that pages name: each is read by its program, and has settings that go together."""

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from forge_rl.cli import commands as programs
from forge_rl.flags.command_line import parse
from forge_rl.flags.fields import flags_of
from forge_rl.run.target import on_target
from tests.test_docs import PAGES, ROOT

COMMAND = re.compile(r"(?:python -m (?:forge_rl |recipes\.|apps\.)|forge-rl )(?!new\b)[a-z].*")
IN_BLOCK = re.compile(rf"(?:    )?(?:[$] |[A-Z_]+=\S+ |salloc .*? (?=python))?({COMMAND.pattern})")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]")
OF_OTHERS = {
    *("--help", "--help-all", "--config", "--dump-config", "--from"),  # of every program, and of `forge-rl new`
    *("--wheel", "--no-deps", "--overrides", "--require-hashes", "--torch-backend", "--no-index", "--upgrade-package"),
    *("--bind-to", "--container-image", "--gpus-per-node", "--no-kill", "--nodes", "--partition", "--gpus"),
    *("--reservation", "--signal", "--wrap", "--include-path"),
}
"""Flags of uv, git, Slurm, mpirun and lm-eval."""


def commands() -> Iterator[str]:
    """Commands in blocks and between backticks, without comments and redirections."""
    for page in (ROOT / "SECURITY.md", *PAGES):
        text = page.read_text().replace("\\\n", " ")
        lines = [match[1] for line in text.splitlines() if (match := IN_BLOCK.fullmatch(line))]
        for line in (*lines, *re.findall(rf"`(?:[A-Z_]+=\S+ )?({COMMAND.pattern[:-1]}[^`\n]+)`", text)):
            words = shlex.split(line, comments=True)
            # What a sentence abbreviates is no command line: forge-rl show, or a last flag without its value.
            if len(words) > 3 - words[0].startswith("forge") and not words[-1].startswith("--model"):
                yield shlex.join(words[: words.index(">")] if ">" in words else words)


COMMANDS = sorted({line for line in commands() if not re.search(r" --help| --dump-config| [A-Z]+\b", line)})


def test_commands_of_many_pages_are_tried() -> None:
    assert len(COMMANDS) > 100
    assert "python -m recipes.grpo --config run.toml --steps 20" in COMMANDS
    assert any("--job slurm:" in line for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_on_a_page_is_read(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for run in ("sums", "wrong"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text('tasks = ["data/train.jsonl"]\n[trainer]\nminibatches = 2\n')
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.replace("python -m forge_rl ", "forge-rl "))
    name, arguments = (words[1], words[2:]) if words[0] == "forge-rl" else (words[2].partition(".")[2], words[3:])
    module = importlib.import_module(programs()[name.replace("_", "-")].removeprefix("forge_rl."))
    with on_target(arguments):
        config = parse(module.Config, name, arguments)
        getattr(config, "check_effects", lambda: None)()


@cache
def own_flags() -> frozenset[str]:
    """Flags of all programs, their groups, and how flags are turned off."""
    names = set[str]()
    for place in programs().values():
        names |= {flag.name for flag in flags_of(importlib.import_module(place.removeprefix("forge_rl.")).Config)}
    groups = {name.rpartition(".")[0] for name in names}
    return frozenset({*names, *groups, *(group.rpartition(".")[0] for group in groups), "--no-mix-rows"})


@cache
def tool_flags() -> frozenset[str]:
    """Flags of benchmarks and tools, whose fields have their names."""
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    fields = {name for file in files for name in re.findall(r"^    (\w+):", file.read_text(), flags=re.MULTILINE)}
    return frozenset(f"--{prefix}{name.replace('_', '-')}" for name in fields for prefix in ("", "no-"))


def unknown_flags(text: str, *, measures: bool) -> list[str]:
    """Flags in a text that no program has.

    Args:
        measures: whether the text is of benchmarks or tools.
    """
    accepted = own_flags() | OF_OTHERS | (tool_flags() if measures else frozenset())
    return [flag for flag in FLAG.findall(text) if flag not in accepted]


@pytest.mark.parametrize("page", [ROOT / "SECURITY.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_on_pages_exist(page: Path) -> None:
    is_figure = page.parent.name == "figures"
    assert [
        flag
        for line in page.read_text().splitlines()
        for flag in unknown_flags(line, measures=is_figure or "benchmarks." in line or "tools." in line)
    ] == []


def test_a_flag_that_no_program_has_is_found() -> None:
    assert unknown_flags("`--transport torchstore`, `--weights.transport`, `--critic.*`", measures=False) == [
        "--transport"
    ]
