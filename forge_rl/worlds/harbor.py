"""Reads Harbor task folders: task.toml, instruction.md, environment/, tests/."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from forge_rl.envs.protocol import Env
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.envs.task_list import TaskList, check_own_task, split
from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.host import check_layers
from forge_rl.sandbox.images import ImageError
from forge_rl.sandbox.providers.containers import check_provider, container_provider
from forge_rl.sandbox.session import check_folders
from forge_rl.types import Message, Task
from forge_rl.worlds.code_world import CodeSession, CodeSettings, CodeWorld
from forge_rl.worlds.container import ContainerSession, task_image
from forge_rl.worlds.harbor_image import harbor_container
from forge_rl.worlds.harbor_registry import REGISTRY, dataset_folder, is_registry_name
from forge_rl.worlds.harbor_trial import HarborSession, memory_bytes, working_folder
from forge_rl.worlds.image_lookahead import image_lookahead
from forge_rl.worlds.shell import SHELL_TOOL

_UNSUPPORTED = {
    "mcp_servers": "MCP servers",
    "gpus": "a GPU",
    "tpu": "a TPU",
    "healthcheck": "services, as it checks their health",
}
"""Settings of the environment in task.toml that are not supported, each with its description."""
_IN_BLOCKS = (
    "You work in a shell. Write commands in a block that begins with ```sh, and you are shown their output. Files "
    "stay; each block starts in the task's folder. Once the task is done, answer without a block: then tests run."
)
_COMPOSED = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_NAMED = 8
"""Number of tasks listed in an error."""
_DEPTH = 4
"""Maximum depth of task folders below the given folder."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task folder.

    [task] = read_tasks(Path("tasks/hello-world"))
    task.image  # "dockerfile:/tasks/hello-world/environment"
    """

    name: str
    """Name from task.toml, or else the folder's name."""
    folder: Path
    instructions: Sequence[str]
    """Text of instruction.md, one per step if the task has steps."""
    config: Mapping[str, Any] = field(repr=False)
    """Content of task.toml."""

    @property
    def has_script(self) -> bool:
        """Whether a script in the task's folder scores the answer."""
        return (self.folder / "tests" / "test.sh").is_file()

    @property
    def image(self) -> str:
        """Name of the task's image, as `ImageStore.get` takes it; "" if it has none."""
        if image := (self.config.get("environment") or {}).get("docker_image"):
            return str(image)
        folder = self.folder / "environment"
        return f"dockerfile:{folder.absolute()}" if (folder / "Dockerfile").is_file() else ""

    @property
    def needs(self) -> str:
        """The first of the task's needs that a sandbox session does not meet; "" if it meets all."""
        environment, verifier = (self.config.get(section) or {} for section in ("environment", "verifier"))
        requirement = next((name for name in _COMPOSED if (self.folder / "environment" / name).is_file()), "")
        if requirement:
            return f"several containers from environment/{requirement}"
        if self.image and not self.has_script:
            return "tests/test.sh, which a task with an image has"
        if self.image.startswith("dockerfile:") and not (shutil.which("buildah") or shutil.which("podman")):
            return "buildah or podman, to build environment/Dockerfile"
        if self.config.get("steps"):
            return f"{len(self.instructions)} steps"
        if verifier.get("environment") or verifier.get("environment_mode") == "separate":
            return "a container of its own for the verifier"
        for name, description in _UNSUPPORTED.items():
            if environment.get(name):
                return description
        if str(environment.get("os", "linux")).lower() != "linux" or (self.folder / "tests" / "test.bat").is_file():
            return "Windows"
        # Harbor fills in ${NAME} from the machine's own environment.
        variables = [*(environment.get("env") or {}).values(), *(verifier.get("env") or {}).values()]
        if requirement := next((str(value) for value in variables if "${" in str(value)), ""):
            return f"the variable {requirement} of this machine"
        return _needed_folder(working_folder(environment)) if self.has_script and not self.image else ""


@dataclass(frozen=True)
class HarborEnv:
    """Makes environments from Harbor task folders: `--env harbor:FOLDER`, with a task's folder or a folder of tasks, or
    `--env harbor:NAME@VERSION`, with a data set of Harbor's registry.

    If a task has tests/test.sh, the model works in a shell, in a sandbox session without a network. A task with an
    image (`docker_image` in task.toml, or environment/Dockerfile) has a session of that image. Others have this
    machine's programs, and begin with the files of the folder `environment` in the working folder (/app unless
    task.toml names another). A completion with commands in fenced blocks, or a call of the tool `shell`, runs them;
    any other completion ends the episode. Then test.sh runs in a fresh session with a copy of the model's files, and
    the number in /logs/verifier/reward.txt or reward.json is the reward. With an image, changes that would run before
    or with the tests are left out: `forge_rl.sandbox.workspaces.image_changes` lists them. Without a script, the
    model answers once, and the run's reward scores the answer. Tasks that need more, such as several containers or a
    GPU, are rejected.

    Raises:
        ConfigError: the folder has no tasks, the data set cannot be fetched, or an option is out of range.
        TaskError: a task cannot be read; names the file and the cause.
    """

    folder: str
    """A task, a folder of tasks, or the name of a data set, of whose versions the newest is taken if none is named."""
    _: KW_ONLY
    skip: bool = False
    """Skip tasks that need what a sandbox does not have, if there are others."""
    max_turns: int = 20
    """Maximum completions per episode; after the last, the tests run on the files as they are."""
    timeout_s: float = 60.0
    """Seconds that the commands of one completion may run."""
    memory_mib: int = 1024
    """Memory of a session, unless task.toml sets memory_mb or memory; a part of it is for files."""
    images: str = "~/.cache/forge_rl/images"
    """Folder of images, shared by runs."""
    datasets: str = "~/.cache/forge_rl/harbor"
    """Folder of the data sets that have been fetched, shared by runs."""
    registry: str = REGISTRY
    """URL or file of the registry of data sets."""
    local: bool = False
    """Take images in files of this machine that tasks name (`docker_image = "oci:FOLDER"`): only for your own."""
    provider: str = ""
    """Who runs the containers of images: docker, daytona, e2b or modal; "" for sandbox sessions of this machine."""
    tool: bool = False
    """Show the model the schema of `shell`, for models trained to call tools. Blocks work as well."""
    held_out_share: float = 0.1
    """Share of held-out tasks; which ones depends only on their instructions."""
    settings: CodeSettings = field(init=False, repr=False)
    tasks: Sequence[HarborTask] = field(init=False, repr=False, compare=False)
    """All tasks of the folder."""

    def __post_init__(self) -> None:
        minimums = {"memory_mib": 64, "held_out_share": 0}
        check_flags(self, "--env harbor:", minimum=minimums, above={"timeout_s": 0}, below={"held_out_share": 1})
        check_provider(self.provider, "--env harbor:")
        settings = CodeSettings(
            flag="--env harbor:",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            instruction="" if self.tool else _IN_BLOCKS,
            languages=SHELL,
            shows_schema=self.tool,
        )
        object.__setattr__(self, "settings", settings)
        folder = Path(self.folder).expanduser()
        # An existing folder takes precedence over a data set of its name.
        if is_registry_name(self.folder):
            folder = dataset_folder(self.folder, cache=Path(self.datasets), registry=self.registry)
        object.__setattr__(self, "tasks", read_tasks(folder))

    @property
    def in_process(self) -> bool:
        """Whether its environments only show messages, so that they can run in the controller."""
        return not any(task.has_script for task in self.tasks)

    def __call__(self, task: Task) -> Env:
        """Make the environment of one episode."""
        check_own_task(task, "has_script", "--env harbor")
        if not task.truth["has_script"]:
            return SingleTurn(task)
        session: CodeSession = (
            self.container(task)
            if task.truth.get("image")
            else HarborSession(task, timeout_s=self.timeout_s, memory_mib=self.memory_mib)
        )
        return CodeWorld(self.settings, task, tool=SHELL_TOOL, session=session)

    def container(self, task: Task) -> ContainerSession:
        """Return the container of one episode of a task, for an agent that works in it.

        Raises:
            TaskError: the task has no image.
        """
        if not task.truth.get("image"):
            raise TaskError(f"{task.id} has no image", hint="give it a docker_image, or a Dockerfile")
        return harbor_container(
            task,
            timeout_s=self.timeout_s,
            memory_mib=self.memory_mib,
            store=self.images,
            provider=self.provider,
        )

    def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
        """Begin to fetch the images of coming tasks; see `ImageLookahead.prepare`."""
        # A provider fetches images itself.
        references = [str(task.truth["image"]) for task in tasks if task.truth.get("image")]
        return image_lookahead(self.images).prepare(references) if references and not self.provider else {}

    def serve_files(self, address: str, key: str) -> Sequence[str]:
        """Serve images' layers to other hosts of the run; see `EnvFactory`."""
        return [] if self.provider else image_lookahead(self.images).serve_files(address, key)

    def ask_peers(self, urls: Sequence[str], key: str) -> None:
        """Ask other hosts of the run for images' layers first."""
        if not self.provider:
            image_lookahead(self.images).ask_peers(urls, key)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the task source.

        Raises:
            ConfigError: some tasks need what a sandbox does not have; lists them.
            TaskError: a task names an image that is not a registry's.
            SandboxError: this machine cannot isolate the sessions that the others need.
        """
        for task in self.tasks:
            _check_image(task, local=self.local, provider=self.provider)
        refused_tasks = [task for task in self.tasks if task.needs]
        usable_tasks = [task for task in self.tasks if not task.needs]
        # All of them are listed before a run starts, instead of failing one by one in it.
        if refused_tasks and not (self.skip and usable_tasks):
            task_lines = "\n".join(f"  {task.name}: {task.needs}" for task in refused_tasks[:_NAMED])
            more = f"\n  and {len(refused_tasks) - _NAMED} more" if len(refused_tasks) > _NAMED else ""
            skip_hint = f"add skip=true to train on the other {len(usable_tasks)}, or " if usable_tasks else ""
            raise ConfigError(
                f"{len(refused_tasks)} of {len(self.tasks)} tasks in {self.folder} need what a sandbox does not have:\n"
                f"{task_lines}{more}",
                hint=f"{skip_hint}run them with your own agent, start(agent=...)",
            )
        if any(task.has_script and not (self.provider and task.image) for task in usable_tasks):
            # Only tasks whose tests run on this machine need its isolation.
            check_layers("process")
        if self.provider:
            container_provider(self.provider)
        name = f"harbor:{Path(self.folder).expanduser().name}"
        tasks = [_task(task, name) for task in usable_tasks]
        # By instruction, so that copies of a task under other names stay on one side.
        train, held_out = split(tasks, self.held_out_share, key=lambda task: task.prompt)
        return {name: TaskList(name, train, held_out, seed=seed)}


def read_tasks(folder: Path) -> list[HarborTask]:
    """Read all task folders below a folder, or the folder itself if it is a task, sorted by path.

    Raises:
        ConfigError: no task is found.
        TaskError: a task cannot be read, or two have the same name.
    """
    folders = [folder] if (folder / "task.toml").is_file() else sorted(_folders(folder, _DEPTH))
    if not folders:
        raise ConfigError(
            f"{folder} has no Harbor task", hint="name a folder with a task.toml, or a folder of such folders"
        )
    tasks = [_read(task_folder) for task_folder in folders]
    by_name: dict[str, HarborTask] = {}
    for task in tasks:
        if (other := by_name.setdefault(task.name, task)) is not task:
            raise TaskError(
                f"{other.folder} and {task.folder} are both named {task.name!r}", hint="rename one in its task.toml"
            )
    return tasks


def _needed_folder(path: str) -> str:
    """Describe a folder that a session cannot mount; "" if it can."""
    try:
        check_folders({path: "work"})
    except ConfigError:
        return f"the folder {path!r:.80}"
    return ""


def _folders(folder: Path, depth: int) -> list[Path]:
    folders = []
    for path in folder.iterdir() if folder.is_dir() and depth else ():
        if (path / "task.toml").is_file():
            folders.append(path)
        # Hidden folders, such as .git, hold no tasks.
        elif path.is_dir() and not path.name.startswith("."):
            folders += _folders(path, depth - 1)
    return folders


def _read(folder: Path) -> HarborTask:
    file = folder / "task.toml"
    try:
        config = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # the TOML error has line and column
        raise TaskError(f"{file} cannot be read: {error}", hint="fix the file") from None
    _check_settings(file, config)
    steps = config.get("steps") or []
    try:
        files = [folder / "steps" / step["name"] / "instruction.md" for step in steps] or [folder / "instruction.md"]
        instructions = [path.read_text().strip() for path in files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"the task {folder} has no instruction: {error!r}", hint="write its instruction.md") from None
    task_section = config.get("task")
    name = task_section.get("name") if isinstance(task_section, dict) else None
    return HarborTask(name=str(name or folder.name), folder=folder, instructions=instructions, config=config)


def _check_settings(file: Path, config: Mapping[str, Any]) -> None:
    """Check the settings that episodes use.

    Raises:
        TaskError: one has another form; names the file.
    """
    environment, verifier = (config.get(section) or {} for section in ("environment", "verifier"))
    try:
        for section in (environment, verifier):
            if not isinstance(section, dict) or not isinstance(section.get("env") or {}, dict):
                raise TypeError("`environment`, `verifier` and their `env` are tables")
        memory_bytes(environment, 1)
        # Converted, as an episode does it.
        for value in (environment.get("cpus") or 1, verifier.get("timeout_sec") or 1):
            if not float(value) > 0:
                raise ValueError(f"`cpus` or `timeout_sec` is {value!r:.80}")
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError(f"{file}: {error}", hint="fix the file") from None


def _check_image(task: HarborTask, *, local: bool, provider: str) -> None:
    image = task.image if provider else (task.config.get("environment") or {}).get("docker_image")
    if image:
        try:
            task_image(str(image), local=local, provider=provider)
        except ImageError as error:
            raise TaskError(f"{task.folder / 'task.toml'}: {error.message}", hint=error.hint) from None


def _task(task: HarborTask, source: str) -> Task:
    messages: tuple[Message, ...] = ({"role": "user", "content": task.instructions[0]},)
    truth = {
        "folder": str(task.folder.absolute()),
        "config": dict(task.config),
        "has_script": task.has_script,
        **({"image": task.image} if task.image else {}),  # left out otherwise: older checkpoints have no such key
    }
    return Task(id=task.name, source=source, messages=messages, truth=truth)
