"""Repositories as worlds: a task is a revision, a problem and tests; the model works in a shell, and tests score it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.envs.code_blocks import QUEUE_S, BlockUse
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.task_list import TaskList, split
from forge_rl.envs.tool import Tool
from forge_rl.envs.tools import ToolSettings
from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.sandbox import Checkout, Limits, PoolSession, RepositoryStore, SandboxError, shared_pool
from forge_rl.sandbox.durable import DivergedError, repeatable
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.workspaces.changes import Change
from forge_rl.sandbox.workspaces.repository_tests import RepositoryTests, Verdict
from forge_rl.types import Message, Task, ToolCall

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
"""How often one command may lose its server."""
_START = """import os, subprocess, sys
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.environ["PYTHONPATH"] = ":".join({packages!r})
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
def shell(command):
    bash = next(path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(path))
    return subprocess.run([bash, "-c", command], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT).returncode
"""


class RepositoryEnv:
    """Makes environments in which the model changes a repository: `--env repository:FILE`.

        python -m recipes.grpo --tasks --env repository:tasks.jsonl,packages=venv/lib/python3.11/site-packages

    FILE has a JSON object on each line: `repository` (a URL, or a folder), `revision`, `problem`, `tests` (ids of
    pytest) or `command` (which must exit with 0), and optionally `test_files` (text by path), `test_patch` (a diff),
    `protected` (names of files whose changes don't count) and `id`. Rows of SWE-bench are read as they are. A
    completion with commands in fenced blocks, or a call of the tool `shell`, runs them in the episode's workspace,
    without a network; any other completion ends the episode. Then the tests run in a fresh session, on what the model
    changed outside of tests: the reward is 1.0 if all pass, else 0.0, and its part `tests_passed` is the share that
    pass. `forge_rl.sandbox.workspaces.repository_tests` lists the protections.

    Args:
        file: the tasks.
        packages: folder of packages, a site-packages folder with pytest and what the repositories need.
        max_turns: maximum completions per episode; after the last, the tests run on the files as they are.
        timeout_s: seconds that the commands of one completion may run.
        tests_timeout_s: seconds that the tests may run.
        memory_mib: memory of a session, of which an eighth may be changed files.
        store: folder of checkouts, shared by runs.
        tool: show the model the schema of `shell`, for models trained to call tools. Blocks work as well.
        held_out_share: share of held-out tasks; which ones depends only on their problems.

    Raises:
        ConfigError: an option is out of range, or the file has no tasks.
        TaskError: a row cannot be read; names its line.
    """

    def __init__(
        self,
        file: str,
        *,
        packages: str = "",
        max_turns: int = 20,
        timeout_s: float = 60.0,
        tests_timeout_s: float = 300.0,
        memory_mib: int = 1024,
        store: str = "~/.cache/forge_rl/repositories",
        tool: bool = False,
        held_out_share: float = 0.1,
    ) -> None:
        self.file, self.store, self.tool = Path(file).expanduser(), store, tool
        self.timeout_s, self.tests_timeout_s, self.memory_mib = timeout_s, tests_timeout_s, memory_mib
        self.held_out_share = held_out_share
        limits = {"minimum": {"memory_mib": 64, "held_out_share": 0}, "above": {"timeout_s": 0, "tests_timeout_s": 0}}
        check_flags(self, "--env repository:", **limits, below={"held_out_share": 1})
        self.packages = [str(Path(packages).expanduser().resolve())] if packages else []
        if packages and not Path(self.packages[0]).is_dir():
            raise ConfigError(
                f"--env repository:packages={packages} is not a folder", hint="name a site-packages folder"
            )
        instruction = "" if tool else _INSTRUCTION
        self.settings = ToolSettings(
            max_turns=max_turns, timeout_s=QUEUE_S, max_output_chars=4000, instruction=instruction
        )
        self.tasks = _read(self.file)

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

    def __call__(self, task: Task) -> RepositoryUse:
        """Make the environment of one episode."""
        return RepositoryUse(self, task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the task source."""
        train, held_out = split(self.tasks, self.held_out_share, key=lambda task: task.prompt)
        name = f"repository:{self.file.stem}"
        return {name: TaskList(name, train, held_out, seed=seed)}


class RepositoryUse:
    """One episode in a repository. The workspace is opened with the first commands."""

    def __init__(self, config: RepositoryEnv, task: Task) -> None:
        self._config = config
        self._truth: Mapping[str, Any] = task.truth
        tool = replace(_TOOL, owner=self)
        self._use = BlockUse(config.settings, task, tool, languages=SHELL, shows_schema=config.tool)
        self._opened = contextlib.AsyncExitStack()
        self._checkout: Checkout | None = None
        self._session: PoolSession | None = None
        self._log: list[tuple[str, str]] = []
        """Commands so far, and what the model was shown of each."""

    async def reset(self) -> Observation:
        return await self._use.reset()

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        step = await self._use.step(completion, truncated=truncated, calls=calls)
        return await self._scored(step) if step.done else step

    async def run(self, command: str) -> str:
        """Run a shell command in the workspace; return what the model is shown.

        If the sandbox's server dies, the episode continues in another session. If it dies during the command, which may
        be half done, all earlier commands are first rerun on a fresh checkout.

        Raises:
            DivergedError: they showed something else than before.
            SandboxError: the sandbox failed again and again.
        """
        output = await self._surviving(functools.partial(self._run, command))
        self._log.append((command, output))
        return output

    async def _surviving(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work; retry it if the server of its session is lost meanwhile."""
        for retries_left in range(_MOST_LOST, -1, -1):
            try:
                return await work()
            except DivergedError:
                raise
            except SandboxError:
                if not retries_left or (self._session is not None and not self._session.lost):
                    raise
                await self._end()
        raise AssertionError("unreachable")

    async def _rerun(self) -> PoolSession:
        """Open a session and repeat the commands so far in it."""
        self._session = await self._open()
        for number, (command, old_output) in enumerate(self._log, 1):
            output = await self._run(command)
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
        result = await session.run(f"shell({command!r})")
        parts = [result.stdout, result.stderr]
        if result.error is not None:
            is_timeout = "CellOverrun" in result.error.name
            parts.append(
                f"error: {f'it took longer than {self._config.timeout_s:g} s' if is_timeout else result.error.message}"
            )
        elif result.value not in ("0", None):
            parts.append(f"exit status {result.value}")
        if not session.alive:
            await self._replace(session)
            parts.append("Running programs are gone; files are kept.")
        return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "(no output)"

    async def close(self) -> None:
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
        pool, limits = await shared_pool(self._config.packages), self._config.limits(of_tests=of_tests)
        session = await pool.open(workspace=self._checkout.folder, limits=limits)
        await session.run(_START.format(packages=self._config.packages))
        return session

    async def _replace(self, session: PoolSession) -> PoolSession:
        """Continue in a new session with the files of a session that its commands killed."""
        changes = await session.changes(leave_out=())
        await session.close()
        self._session = None
        self._session = await self._open()
        await self._session.apply(changes.changes)
        return self._session

    async def _scored(self, step: Step) -> Step:
        """Close the model's session, and run the tests in another."""
        changes: Sequence[Change] = ()
        if self._session is not None:
            changes = (await self._session.changes()).changes
            await self._end()
        verdict = await self._surviving(functools.partial(self._verdict, changes))
        share = sum(verdict.passed.values()) / len(verdict.passed)
        return replace(step, reward=float(verdict.all_passed), parts={**step.parts, "tests_passed": share})

    async def _verdict(self, changes: Sequence[Change]) -> Verdict:
        """Run the tests in a session of their own."""
        tests = replace(_tests(self._truth), packages=self._config.packages, timeout_s=self._config.tests_timeout_s)
        self._session = await self._open(of_tests=True)
        verdict = await tests.run(self._session, changes)
        await self._end()
        return verdict


async def _shell(episode: RepositoryUse, command: str) -> str:
    """Run a shell command in the repository's folder, and return its output. Changed files stay.

    Args:
        command: the command.
    """
    return await episode.run(command)


_shell.__name__ = "shell"
_TOOL = Tool(_shell, is_method=True)


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> RepositoryStore:
    return RepositoryStore(Path(folder))


def _read(file: Path) -> list[Task]:
    """Read the tasks of a file."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="--env repository: takes a JSONL file") from None
    tasks = list[Task]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(json.loads(line), f"{file.stem}/{number}", f"repository:{file.stem}"))
            except (ValueError, RecursionError, KeyError, TypeError, ConfigError) as error:
                cause = f"there is no {error}" if isinstance(error, KeyError) else str(error)
                raise TaskError(f"{file}:{number}: {cause}", hint="see `forge_rl.envs.repository`") from None
    if not tasks:
        raise ConfigError(f"{file} has no tasks", hint="write a JSON object on each line")
    return tasks


def _task(row: Mapping[str, Any], name: str, source: str) -> Task:
    row = {
        **row,
        **{
            our_name: row[their_name]
            for our_name, their_name in _SWE.items()
            if our_name not in row and their_name in row
        },
    }
    repository = str(row["repository"])
    if "://" not in repository and not repository.startswith(("/", ".", "~")) and "repo" in row:
        repository = _GITHUB + repository
    lists = [row.get(key) or [] for key in ("tests", "FAIL_TO_PASS", "PASS_TO_PASS")]
    tests = [str(test) for value in lists for test in (json.loads(value) if isinstance(value, str) else value)]
    truth = {
        "repository": repository,
        "revision": str(row["revision"]),
        "tests": tests,
        "command": str(row.get("command") or ""),
        "test_files": dict(row.get("test_files") or {}),
        "test_patch": str(row.get("test_patch") or ""),
        "protected": [str(file) for file in row.get("protected") or []],
    }
    _tests(truth)
    messages: tuple[Message, ...] = ({"role": "user", "content": str(row["problem"])},)
    return Task(id=str(row.get("id") or name), source=source, messages=messages, truth=truth)


def _tests(truth: Mapping[str, Any]) -> RepositoryTests:
    return RepositoryTests(
        tests=truth["tests"],
        command=truth["command"],
        files=truth["test_files"],
        patch=truth["test_patch"],
        protected=truth["protected"],
    )
