"""Run the commands of the tutorial of ten tasks as they stand, and runs of other kinds, and take all their pictures.

python -m tools.record_runs FOLDER   # about 15 minutes on two cores; the runs are in FOLDER/runs afterwards

A run of each kind is there: `sums` (one turn), `guess` (a world), `agent` (with a sub-agent), `mixed` (tools among
others) and `failed`, whose engine is killed and whose reward raises in the end.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from tests.commands import Command, actor_of
from tools import page_pictures
from tools.terminal_picture import FOLDER, picture, printed

TUTORIAL = Path(__file__).parent.parent / "docs" / "doors" / "first-tasks.md"
_KEYS = {
    "tool": ['price {"item": "apple", "count": 2}', 'price {"item": "plum"}', "6"],
    "world": ["5", "2", "3"],
}
"""Lines to type into the commands of pictures, which end with the last one."""
_MIXED = (
    "forge-rl mixture --steps 4 --groups-per-batch 6 --group-size 4 --evaluation.every 2 --evaluation.tasks 8 "
    "--out runs/mixed"
)
_FAILED = (
    'forge-rl agent-command --command "python agent.py" --tasks data/train.jsonl:question=problem,answer=solution '
    "--reward lookup.py:score --reward.wait-for-another-s 0 --steps 20 --groups-per-batch 2 --group-size 4 "
    "--evaluation.every 0 --out runs/failed"
)
_LOOKUP = """
from pathlib import Path

ANSWERS = Path(__file__).with_name("answers.txt")


def score(task, text: str) -> float:
    return float(bool(ANSWERS.read_text()) and task.truth["answer"] in text)
"""
"""A reward that raises once its file is gone."""
_DEADLINE_S = 900.0
_PARTS = re.compile(r"```(\w+)\n(.*?)```|((?:!\[[^]]*\]\(\.\./pictures/tasks/\w+\.svg\)\s*)+)", re.DOTALL)
"""A block of the tutorial, or pictures of terminals one after the other."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Record the runs of the documentation and take their pictures."""

    folder: tyro.conf.Positional[Path]
    """Folder of the runs, which must not exist."""


@dataclass(frozen=True)
class Line:
    """A command of the tutorial."""

    text: str
    picture: str = ""
    """Name of the picture of its output, "" for none."""
    typed: tuple[str, ...] = ()
    """What is typed into Python, for a command that is not on the page."""


def tutorial() -> tuple[dict[str, str], list[Line]]:
    """Read the tutorial: its files by name, and its commands. A picture shows the last command before it."""
    files, lines = dict[str, str](), list[Line]()
    for language, body, pictures in _PARTS.findall(TUTORIAL.read_text()):
        if pictures:
            names = re.findall(r"tasks/(\w+)\.svg", pictures)
            for place, name in enumerate(names, len(lines) - len(names)):
                lines[place] = replace(lines[place], picture=name)
        elif language == "sh":
            lines += [Line(text) for text in body.splitlines()]
        elif named := re.match(r"# (\S+\.py)\n", body):
            files[named[1]] = body
        else:
            lines.append(Line("python -q", typed=tuple(filter(None, body.splitlines()))))
    return files, lines


def record(folder: Path, runs: Collection[str] = (), *, draw: bool = False, steps: int = 0) -> Path:
    """Run commands in a folder, one after the other; the first that fails raises.

    Args:
        runs: names of the runs to record; everything, also the commands that start no run, if empty.
        draw: whether the pictures of terminals are written.
        steps: number of steps of each run but the one that fails, which are not evaluated; if 0, as in the tutorial.

    Returns:
        The folder of the runs.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    files, lines = tutorial()
    if steps:
        lines = [replace(line, text=_of_steps(line.text, steps)) for line in lines]
    folder.mkdir(parents=True)
    for name, text in {**files, "lookup.py": _LOOKUP, "answers.txt": "all"}.items():
        (folder / name).write_text(text)
    live: tuple[Line, Command] | None = None
    for place, line in enumerate(lines):
        name = match[1] if (match := re.search(r"--out runs/(\w+)", line.text)) else ""
        if runs and place and (name not in runs or (folder / "runs" / name).exists()):
            continue
        print(line.text, flush=True)
        if line.typed:
            assert live is not None, "the command before it starts a run"
            live[1].wait_for(r"^step +5/", _DEADLINE_S)
            _drawn(line, printed(line.text, [*line.typed, "exit()"], 100, cwd=folder), draw=draw)
            _drawn(live[0], _ended(live[1]), draw=draw)
        elif not name:
            _drawn(line, printed(line.text, _KEYS.get(line.picture, []), 100, cwd=folder), draw=draw)
        else:
            command = Command(line.text, cwd=folder, program=("bash", "-c"))
            if lines[place + 1].typed:
                live = line, command  # which is steered
            else:
                _drawn(line, _ended(command), draw=draw)
    if not runs or "mixed" in runs:
        mixed = _of_steps(_MIXED, steps) if steps else _MIXED
        print(mixed, flush=True)
        _ended(Command(mixed, cwd=folder, program=("bash", "-c")))
    if not runs or "failed" in runs:
        print(_FAILED, flush=True)
        _fail(folder)
    return folder / "runs"


def _of_steps(command: str, steps: int) -> str:
    command = re.sub(r"--steps \d+", f"--steps {steps}", command)
    return re.sub(r"--evaluation.every \d+( --evaluation.tasks \d+)?", "--evaluation.every 0", command)


def _fail(folder: Path) -> None:
    """Run a command that loses an engine, which is replaced, and then its reward, which ends it."""
    command = Command(_FAILED, cwd=folder, program=("bash", "-c"))
    try:
        command.wait_for(r"^step +1/", _DEADLINE_S)
        actor_of(command, "generator").kill()
        command.wait_for(r"^step +2/", _DEADLINE_S)
        (folder / "answers.txt").unlink()
        status = command.end(_DEADLINE_S)
    finally:
        command.clean_up()
    assert status == 1, command.output


def _ended(command: Command) -> str:
    """Wait until a command has ended and return its output."""
    try:
        status = command.end(_DEADLINE_S)
    finally:
        command.clean_up()
    assert status == 0, command.output
    return command.output


def _drawn(line: Line, output: str, *, draw: bool) -> None:
    if draw and line.picture:
        path = FOLDER / f"{line.picture}.svg"
        path.write_text(picture(line.text, output, columns=100, max_lines=44))
        print(f"  {path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def main(config: Config) -> None:
    """Record the runs and write all pictures."""
    runs = record(config.folder, draw=True)
    page_pictures.main(page_pictures.Config(runs=runs))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
