"""Repositories as worlds: a task is a revision, a problem and tests; the model works in a shell, and tests score it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.envs.task_list import TaskList, check_own_task, split
from forge_rl.envs.tool import Tool
from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.sandbox import Checkout, Limits, PoolSession, RepositoryStore, SandboxError, shared_pool
from forge_rl.sandbox.durable import DivergedError, repeatable
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.shared import check_shared_pool
from forge_rl.sandbox.workspaces.changes import Change
from forge_rl.sandbox.workspaces.repository_tests import RepositoryTests, Verdict
from forge_rl.types import Message, Task
from forge_rl.worlds.code_world import CodeSession, CodeSettings, CodeWorld, shown_output

_INSTRUCTION = (
    "You work in a copy of a repository. Write shell commands in a block that begins with ```sh, and you are shown "
    "their output. Changed files stay; each block starts in the repository's folder. Once it is solved, answer "
    "without a block: then tests run."
)
_SWE = {"problem": "problem_statement", "revision": "base_commit", "repository": "repo", "id": "instance_id"}
"""Other names of columns, as in SWE-bench, where tests are in FAIL_TO_PASS, PASS_TO_PASS and test_patch."""
T = TypeVar("T")
_GITHUB = "https://github.com/"
_PROCESSES, _FILES, _SHARE = 128, 20_000, 8
_MOST_LOST = 8
"""Maximum losses of the sandbox's server during one command."""
_START = """import os, subprocess, sys
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.environ["PYTHONPATH"] = ":".join({packages!r})
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
def shell(command):
    bash = next(path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(path))
    return subprocess.run([bash, "-c", command], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT).returncode
"""


@dataclass(frozen=True)
class RepositoryEnv:
    """Makes environments in which the model changes a repository: `--env repository:FILE`.

        python -m recipes.grpo --env repository:tasks.jsonl,packages=venv/lib/python3.11/site-packages

    FILE has a JSON object on each line: `repository` (a URL, or a folder), `revision`, `problem`, `tests` (ids of
    pytest) or `command` (which must exit with 0), and optionally `test_files` (text by path), `test_patch` (a diff),
    `protected` (names of files whose changes don't count) and `id`. Rows of SWE-bench are read as they are. A
    completion with commands in fenced blocks, or a call of the tool `shell`, runs them in the episode's workspace,
    without a network; any other completion ends the episode. Then the tests run in a fresh session, on what the model
    changed outside of tests: the reward is 1.0 if all pass, else 0.0, and its part `tests_passed` is the share that
    pass. `forge_rl.sandbox.workspaces.repository_tests` lists the protections.

    Raises:
        ConfigError: an option is out of range, or the file has no tasks.
        TaskError: a row cannot be read; names its line.
    """

    file: str
    """The tasks."""
    _: KW_ONLY
    packages: str = ""
    """Folder of packages, a site-packages folder with pytest and what the repositories need."""
    max_turns: int = 20
    """Maximum completions per episode; after the last, the tests run on the files as they are."""
    timeout_s: float = 60.0
    """Seconds that the commands of one completion may run."""
    tests_timeout_s: float = 300.0
    """Seconds that the tests may run."""
    memory_mib: int = 1024
    """Memory of a session, of which an eighth may be changed files."""
    store: str = "~/.cache/forge_rl/repositories"
    """Folder of checkouts, shared by runs."""
    tool: bool = False
    """Show the model the schema of `shell`, for models trained to call tools. Blocks work as well."""
    held_out_share: float = 0.1
    """Share of held-out tasks; which ones depends only on their problems."""
    settings: CodeSettings = field(init=False, repr=False)
    package_folders: list[str] = field(init=False, repr=False)
    """The folder of packages as an absolute path, if there is one."""
    tasks: Sequence[Task] = field(init=False, repr=False, compare=False)
    """All tasks of the file."""

    def __post_init__(self) -> None:
        limits = {"minimum": {"memory_mib": 64, "held_out_share": 0}, "above": {"tests_timeout_s": 0}}
        check_flags(self, "--env repository:", **limits, below={"held_out_share": 1})
        folders = [str(Path(self.packages).expanduser().resolve())] if self.packages else []
        object.__setattr__(self, "package_folders", folders)
        if not all(Path(folder).is_dir() for folder in self.package_folders):
            raise ConfigError(
                f"--env repository:packages={self.packages} is not a folder", hint="name a site-packages folder"
            )
        settings = CodeSettings(
            flag="--env repository:",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            instruction="" if self.tool else _INSTRUCTION,
            languages=SHELL,
            shows_schema=self.tool,
        )
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "tasks", _read(Path(self.file).expanduser()))

    def limits(self, *, of_tests: bool = False) -> Limits:
        """Return the limits of an episode's sessions; the tests' session has room for their files, too."""
        memory = self.memory_mib << 20
        return Limits(
            wall_s=self.timeout_s,
            memory_bytes=memory,
            processes=_PROCESSES,
            scratch_bytes=memory // _SHARE * (1 + of_tests),
            scratch_files=_FILES * (1 + of_tests),
            transfer_bytes=memory // _SHARE * (1 + of_tests),
        )

    def __call__(self, task: Task) -> CodeWorld:
        """Make the environment of one episode."""
        check_own_task(task, "repository", "--env repository")
        return CodeWorld(self.settings, task, tool=_TOOL, session=RepositorySession(self, task))

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the task source.

        Raises:
            SandboxError: this machine cannot isolate sessions.
        """
        check_shared_pool()
        train, held_out = split(self.tasks, self.held_out_share, key=lambda task: task.prompt)
        name = f"repository:{Path(self.file).stem}"
        return {name: TaskList(name, train, held_out, seed=seed)}


class RepositorySession(CodeSession):
    """A workspace of one repository, opened with the first commands, and the tests of what changed in it."""

    def __init__(self, config: RepositoryEnv, task: Task) -> None:
        self._config, self._task = config, task
        self._truth: Mapping[str, Any] = task.truth
        self._opened = contextlib.AsyncExitStack()
        self._checkout: Checkout | None = None
        self._session: PoolSession | None = None
        self._log: list[tuple[str, str]] = []
        """Commands so far, each with the output that the model was shown."""

    async def run(self, command: str) -> str:
        """Run a shell command in the repository's folder, and return its output. Changed files stay.

        Args:
            command: the command.

        Raises:
            DivergedError: they showed something else than before.
            SandboxError: the sandbox failed again and again.
        """
        # If the sandbox's server dies, the episode continues in another session. If it dies during the command, which
        # may be half done, all earlier commands are first rerun on a fresh checkout.
        output = await self._surviving(functools.partial(self._run, command))
        # Logged once it is finished: a rerun of the log must not include a command that is about to be retried.
        self._log.append((command, output))
        return output

    async def fork(self) -> RepositorySession:
        """Return a session that reruns this one's commands before it runs its first."""
        fork = RepositorySession(self._config, self._task)
        fork._log = [*self._log]
        return fork

    async def _surviving(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work; retry it if the server of its session is lost meanwhile."""
        for retries_left in range(_MOST_LOST, -1, -1):
            try:
                return await work()
            except DivergedError:
                raise
            except SandboxError:
                # Only the loss of a server is worth a retry; what fails in a living session would fail again.
                if not retries_left or (self._session is not None and not self._session.lost):
                    raise
                await self._end()
        raise AssertionError("unreachable")

    async def _rerun(self) -> PoolSession:
        """Open a session and repeat the commands so far in it."""
        self._session = await self._open()
        for number, (command, old_output) in enumerate(self._log, 1):
            output = await self._run(command)
            # The model has seen the old output; files that differ would no longer fit the conversation.
            if repeatable(output) != repeatable(old_output):
                raise DivergedError(
                    f"command {number} of an episode showed {output!r:.200}, not {old_output!r:.200}, when rerun",
                    hint="commands that depend on time or chance cannot be rerun: start the episode again",
                )
        return self._session

    async def _run(self, command: str) -> str:
        session = self._session or await self._rerun()
        if not session.alive:  # killed by a program that an earlier command left running, or lost with its server
            session = await self._replace(session)
        # `_START` has defined `shell` in the session's Python.
        result = await session.run(f"shell({command!r})")
        endings = []
        if result.error is not None:
            is_timeout = "CellOverrun" in result.error.name
            endings.append(
                f"error: {f'it took longer than {self._config.timeout_s:g} s' if is_timeout else result.error.message}"
            )
        elif result.value not in ("0", None):
            endings.append(f"exit status {result.value}")
        if not session.alive:
            await self._replace(session)
            endings.append("Running programs are gone; files are kept.")
        return shown_output(result, *endings)

    async def close(self) -> None:
        """End the session, and let go of the checkout."""
        await self._end()
        await self._opened.aclose()

    async def _end(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _open(self, *, of_tests: bool = False) -> PoolSession:
        """Open a session in a fresh workspace."""
        if self._checkout is None:
            checkout = _store(self._config.store).checkout(self._truth["repository"], self._truth["revision"])
            self._checkout = await self._opened.enter_async_context(checkout)
        pool, limits = await shared_pool(self._config.package_folders), self._config.limits(of_tests=of_tests)
        async with contextlib.AsyncExitStack() as stack:
            session = await pool.open(workspace=self._checkout.folder, limits=limits)
            # Nobody else knows of it yet: an episode that is cancelled here would keep its place in the pool.
            stack.push_async_callback(session.close)
            await session.run(_START.format(packages=self._config.package_folders))
            stack.pop_all()
        return session

    async def _replace(self, session: PoolSession) -> PoolSession:
        """Continue in a new session with the files of a session that its commands killed."""
        # Nothing is left out: the model continues with all files that its commands left.
        changes = await session.changes(leave_out=())
        await session.close()
        self._session = None
        self._session = await self._open()
        await self._session.apply(changes.changes)
        return self._session

    async def score(self) -> tuple[float, Mapping[str, float]]:
        """Close the model's session, and run the tests in another."""
        changes: Sequence[Change] = ()
        # A fork has no session before its first command, but the files of the commands that it would rerun.
        if self._session is not None or self._log:
            changes = await self._surviving(self._changes)
            await self._end()
        verdict = await self._surviving(functools.partial(self._verdict, changes))
        return float(verdict.all_passed), {"tests_passed": sum(verdict.passed.values()) / len(verdict.passed)}

    async def _changes(self) -> Sequence[Change]:
        session = self._session or await self._rerun()
        return (await session.changes()).changes

    async def _verdict(self, changes: Sequence[Change]) -> Verdict:
        """Run the tests in a session of their own."""
        tests = replace(
            _tests(self._truth), packages=self._config.package_folders, timeout_s=self._config.tests_timeout_s
        )
        # Of the tests alone, so that nothing which the model left running can reach them.
        self._session = await self._open(of_tests=True)
        verdict = await tests.run(self._session, changes)
        await self._end()
        return verdict


_TOOL = Tool(RepositorySession.run, is_method=True, alias="shell")


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> RepositoryStore:
    return RepositoryStore(Path(folder))


def _read(file: Path) -> list[Task]:
    """Read the tasks of a file."""
    try:
        # Not `splitlines`, which also splits at characters that JSON allows in strings, such as U+2028.
        lines = file.read_text().split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="--env repository: takes a JSONL file") from None
    tasks = list[Task]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(json.loads(line), f"{file.stem}/{number}", f"repository:{file.stem}"))
            except (ValueError, RecursionError, KeyError, TypeError, ConfigError) as error:
                cause = f"there is no {error}" if isinstance(error, KeyError) else str(error)
                raise TaskError(f"{file}:{number}: {cause}", hint="see `forge_rl.worlds.repository`") from None
    if not tasks:
        raise ConfigError(f"{file} has no tasks", hint="write a JSON object on each line")
    return tasks


def _task(row: Mapping[str, Any], name: str, source: str) -> Task:
    # SWE-bench's names stand in for ours where these are missing.
    row = {
        **row,
        **{
            our_name: row[their_name]
            for our_name, their_name in _SWE.items()
            if our_name not in row and their_name in row
        },
    }
    repository = str(row["repository"])
    # SWE-bench names repositories OWNER/NAME.
    if "://" not in repository and not repository.startswith(("/", ".", "~")) and "repo" in row:
        repository = _GITHUB + repository
    lists = [row.get(key) or [] for key in ("tests", "FAIL_TO_PASS", "PASS_TO_PASS")]
    tests = [str(test) for value in lists for test in (json.loads(value) if isinstance(value, str) else value)]
    truth = {
        "repository": repository,
        "revision": str(row["revision"]),
        "tests": list(dict.fromkeys(map(_whole, tests))),
        "command": str(row.get("command") or ""),
        "test_files": dict(row.get("test_files") or {}),
        "test_patch": str(row.get("test_patch") or ""),
        "protected": [str(file) for file in row.get("protected") or []],
    }
    _tests(truth)
    messages: tuple[Message, ...] = ({"role": "user", "content": str(row["problem"])},)
    return Task(id=str(row.get("id") or name), source=source, messages=messages, truth=truth)


def _whole(test: str) -> str:
    """Return a test's id without parameters that are cut off, as SWE-bench and SWE-Gym cut them at a space."""
    path, colons, name = test.partition("::")
    return test if name.endswith("]") else f"{path}{colons}{name.partition('[')[0]}"


def _tests(truth: Mapping[str, Any]) -> RepositoryTests:
    return RepositoryTests(
        tests=truth["tests"],
        command=truth["command"],
        files=truth["test_files"],
        patch=truth["test_patch"],
        protected=truth["protected"],
    )
