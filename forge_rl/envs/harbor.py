"""Task folders of Harbor: task.toml, instruction.md, environment/, tests/; read and listed."""

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
"""Number of tasks that an error names."""
_DEPTH = 4
"""Most folders between the one that is given and a task's."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task folder.

    [task] = read_tasks(Path("tasks/hello-world"))
    task.needs  # "a container of environment/Dockerfile"
    """

    name: str
    """The name in its task.toml, or else that of its folder."""
    folder: Path
    instructions: Sequence[str]
    """Text of instruction.md; one for each step, where it has steps."""
    config: Mapping[str, Any] = field(repr=False)
    """Content of its task.toml."""

    @property
    def needs(self) -> str:
        """Requirement that it cannot be worked on without, or "" where an answer in text is all."""
        environment = self.config.get("environment") or {}
        if image := environment.get("docker_image"):
            return f"a container of {image}"
        found = next((name for name in _IMAGES if (self.folder / "environment" / name).is_file()), "")
        if found:
            return f"a container of environment/{found}"
        if self.config.get("steps"):
            return f"{len(self.instructions)} steps"
        script = next((each for each in ("test.sh", "test.bat") if (self.folder / "tests" / each).is_file()), "")
        return f"a place to run tests/{script}" if script else ""


class HarborEnv:
    """Makes tasks of Harbor's folders: `--env harbor:FOLDER`, of which one is a task, or has tasks in it.

    A task is shown by its instruction and answered once, and the run's reward scores the answer; its folder and its
    task.toml are in `truth`. Those that must be worked on in a container are refused, for as long as there is no
    sandbox to do that in.

    Args:
        folder: a task, or a folder of tasks.
        skip: leave out tasks that need a container, if others are left.
        held_out_share: share of the tasks that is held out; which ones depends on their instructions alone.

    Raises:
        ConfigError: there are no tasks.
        TaskError: a task cannot be read; says which file and why.
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
        """Return the source of the tasks.

        Raises:
            ConfigError: some need a container; names them.
        """
        refused = [task for task in self.tasks if task.needs]
        kept = [task for task in self.tasks if not task.needs]
        if refused and not (self._skip and kept):
            named = "\n".join(f"  {task.name}: {task.needs}" for task in refused[:_NAMED])
            more = f"\n  and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            left = f"add skip=true to train on the other {len(kept)}, or " if kept else ""
            raise ConfigError(
                f"{len(refused)} of {len(self.tasks)} tasks in {self.folder} need more than an answer in text:\n"
                f"{named}{more}",
                hint=f"{left}let an agent of your own work on them, start(agent=...): there is no sandbox for them yet",
            )
        name = f"harbor:{self.folder.name}"
        made = [_task(task, name) for task in kept]
        train, held_out = split(made, self._share, key=lambda task: task.prompt)
        return {name: TaskList(name, train, held_out, seed=seed)}


def read_tasks(folder: Path) -> list[HarborTask]:
    """Read all task folders in a folder, or the one that it is, in the order of their paths.

    Raises:
        ConfigError: there are none.
        TaskError: one cannot be read, or two have the same name.
    """
    found = [folder] if (folder / "task.toml").is_file() else sorted(_folders(folder, _DEPTH))
    if not found:
        raise ConfigError(
            f"{folder} has no task of Harbor", hint="name a folder with a task.toml, or one that has such folders in it"
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
    except (OSError, ValueError) as error:  # TOML's own error says line and column
        raise TaskError(f"{file} cannot be read: {error}", hint="mend it") from None
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


harbor = HarborEnv  # the name that the flag calls it by
