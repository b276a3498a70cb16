"""Reads Harbor task folders: task.toml, instruction.md, environment/, tests/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_rl.envs.protocol import Env
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.envs.task_list import TaskList, split
from forge_rl.errors import ConfigError, TaskError
from forge_rl.types import Message, Task

_IMAGES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_NAMED = 8
"""Number of tasks listed in an error."""
_DEPTH = 4
"""Maximum depth of task folders below the given folder."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task folder.

    [task] = read_tasks(Path("tasks/hello-world"))
    task.needs  # "a container from environment/Dockerfile"
    """

    name: str
    """Name from task.toml, or else the folder's name."""
    folder: Path
    instructions: Sequence[str]
    """Text of instruction.md, one per step if the task has steps."""
    config: Mapping[str, Any] = field(repr=False)
    """Content of task.toml."""

    @property
    def needs(self) -> str:
        """What the task needs besides a text answer; "" if nothing."""
        environment = self.config.get("environment") or {}
        if image := environment.get("docker_image"):
            return f"a container from {image}"
        found = next((name for name in _IMAGES if (self.folder / "environment" / name).is_file()), "")
        if found:
            return f"a container from environment/{found}"
        if self.config.get("steps"):
            return f"{len(self.instructions)} steps"
        script = next((each for each in ("test.sh", "test.bat") if (self.folder / "tests" / each).is_file()), "")
        return f"a place to run tests/{script}" if script else ""


class HarborEnv:
    """Makes environments from Harbor task folders: `--env harbor:FOLDER`, with a task's folder or a folder of tasks.

    The model sees a task's instruction and answers once; the run's reward scores the answer. The task's folder and
    task.toml are in `truth`. Tasks that need a container are rejected, and those with a test script: it expects folders
    at the root, such as /tests and /logs, that sandbox sessions do not have.

    Args:
        folder: a task, or a folder of tasks.
        skip: skip tasks that need a container, if there are others.
        held_out_share: share of held-out tasks; which ones depends only on their instructions.

    Raises:
        ConfigError: there are no tasks.
        TaskError: a task cannot be read; names the file and the cause.
    """

    in_process = True

    def __init__(self, folder: str, *, skip: bool = False, held_out_share: float = 0.1) -> None:
        if not 0 <= held_out_share < 1:
            raise ConfigError(f"held_out_share is {held_out_share} in --env harbor", hint="choose 0 to below 1")
        self.folder = Path(folder).expanduser()
        self.tasks = read_tasks(self.folder)
        self._skip = skip
        self._share = held_out_share

    def __call__(self, task: Task) -> Env:
        """Make the environment of one episode."""
        return SingleTurn(task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the task source.

        Raises:
            ConfigError: some tasks need a container; lists them.
        """
        refused = [task for task in self.tasks if task.needs]
        kept = [task for task in self.tasks if not task.needs]
        if refused and not (self._skip and kept):
            named = "\n".join(f"  {task.name}: {task.needs}" for task in refused[:_NAMED])
            more = f"\n  and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            left = f"add skip=true to train on the other {len(kept)}, or " if kept else ""
            raise ConfigError(
                f"{len(refused)} of {len(self.tasks)} tasks in {self.folder} need more than a text answer:\n"
                f"{named}{more}",
                hint=f"{left}run them with your own agent, start(agent=...): the sandbox has no images",
            )
        name = f"harbor:{self.folder.name}"
        made = [_task(task, name) for task in kept]
        train, held_out = split(made, self._share, key=lambda task: task.prompt)
        return {name: TaskList(name, train, held_out, seed=seed)}


def read_tasks(folder: Path) -> list[HarborTask]:
    """Read all task folders below a folder, or the folder itself if it is a task, sorted by path.

    Raises:
        ConfigError: there are no tasks.
        TaskError: a task cannot be read, or two have the same name.
    """
    found = [folder] if (folder / "task.toml").is_file() else sorted(_folders(folder, _DEPTH))
    if not found:
        raise ConfigError(
            f"{folder} has no Harbor task", hint="name a folder with a task.toml, or a folder of such folders"
        )
    tasks = [_read(each) for each in found]
    by_name: dict[str, HarborTask] = {}
    for task in tasks:
        if (other := by_name.setdefault(task.name, task)) is not task:
            raise TaskError(
                f"{other.folder} and {task.folder} are both named {task.name!r}", hint="rename one in its task.toml"
            )
    return tasks


def _folders(folder: Path, depth: int) -> list[Path]:
    found = []
    for path in folder.iterdir() if folder.is_dir() and depth else ():
        if (path / "task.toml").is_file():
            found.append(path)
        elif path.is_dir() and not path.name.startswith("."):
            found += _folders(path, depth - 1)
    return found


def _read(folder: Path) -> HarborTask:
    file = folder / "task.toml"
    try:
        config = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:  # the TOML error has line and column
        raise TaskError(f"{file} cannot be read: {error}", hint="fix the file") from None
    steps = config.get("steps") or []
    try:
        files = [folder / "steps" / step["name"] / "instruction.md" for step in steps] or [folder / "instruction.md"]
        instructions = [each.read_text().strip() for each in files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"the task {folder} has no instruction: {error!r}", hint="write its instruction.md") from None
    about = config.get("task")
    name = about.get("name") if isinstance(about, dict) else None
    return HarborTask(name=str(name or folder.name), folder=folder, instructions=instructions, config=config)


def _task(task: HarborTask, source: str) -> Task:
    messages: tuple[Message, ...] = ({"role": "user", "content": task.instructions[0]},)
    truth = {"folder": str(task.folder), "config": dict(task.config)}
    return Task(id=task.name, source=source, messages=messages, truth=truth)
