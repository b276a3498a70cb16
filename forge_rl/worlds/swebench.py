"""SWE-bench, SWE-Gym and R2E-Gym as worlds: the model works in a row's image, and the row's tests score it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from forge_rl.envs.task_list import TaskList, check_own_task, split
from forge_rl.errors import InfrastructureError, check_flags
from forge_rl.sandbox import Limits, SandboxError
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.host import check_layers
from forge_rl.sandbox.providers.containers import check_provider, container_provider
from forge_rl.sandbox.workspaces.changes import Change
from forge_rl.sandbox.workspaces.repository_tests import RepositoryTests
from forge_rl.system.interpreters import interpreter
from forge_rl.types import Task
from forge_rl.worlds.code_world import CodeSettings, CodeWorld
from forge_rl.worlds.container import Attempt, Container, ContainerSession, JudgeSession, task_image
from forge_rl.worlds.image_lookahead import image_lookahead
from forge_rl.worlds.shell import SHELL_TOOL
from forge_rl.worlds.swebench_rows import (
    END,
    EXIT_CODE,
    FAILED,
    START,
    RowSettings,
    passed_tests,
    read_rows,
    statuses_of,
)

_REQUIRED = "swebench==5.0.2"
_PARSER = Path(__file__).with_name("peers") / "swebench_log.py"
_IN_BLOCKS = (
    "You work in a repository's container, in its folder {folder}. Write shell commands in a block that begins with "
    "```sh, and you are shown their output. Changed files stay. Once it is solved, answer without a block: then tests "
    "run."
)
_PROCESSES, _FILES, _SHARE = 256, 100_000, 4
_OUTPUT_BYTES = 4 << 20
_PARSE_S = 300.0


@dataclass(frozen=True)
class SweBenchEnv:
    """Makes environments of SWE-bench, SWE-Gym and R2E-Gym: `--env swebench:FILE`.

        python -m recipes.grpo --env swebench:verified.jsonl,max_turns=50

    FILE has a row of such a data set as JSON on each line. The model works in a shell, in a session of the row's image
    (columns `image`, `docker_image` or `image_name`, or the name that the option `image` makes) without a network. A
    completion with commands in fenced blocks, or a call of the tool `shell`, runs them; any other completion ends the
    episode. Then the row's script (`eval_script`, or else the test files of `test_patch`) runs in a fresh session of
    the image, on what the model changed in the repository outside of tests and their configuration. The reward is 1.0
    if all of FAIL_TO_PASS pass and none of PASS_TO_PASS fails, else 0.0; its part `tests_passed` is their share.

    A row with a `log_parser` is read by the package swebench, in an interpreter of its own.

    Raises:
        ConfigError: an option is out of range, or the file has no tasks.
        TaskError: a row cannot be read; names its line.
    """

    file: str
    """The rows."""
    _: KW_ONLY
    image: str = "swebench/sweb.eval.x86_64.{id}:latest"
    """Image of rows that name none: `{id}` is the row's instance_id in lower case with `_1776_` for `__`, `{id_s}` with
    `_s_`, as SWE-Gym's `xingyaoww/sweb.eval.x86_64.{id_s}`."""
    folder: str = "/testbed"
    """Folder of the repository in images."""
    command: str = "pytest -rA --tb=no -p no:cacheprovider {files}"
    """Test command of rows without an `eval_script` or `test_cmd`."""
    python: str = ""
    """Interpreter with the package swebench; by default one is made on first use."""
    images: str = "~/.cache/forge_rl/images"
    """Folder of images, shared by runs."""
    local: bool = False
    """Take images in files of this machine that rows name (`oci:FOLDER`): only for rows of your own."""
    provider: str = ""
    """Who runs the containers of images: docker, daytona, e2b or modal; "" for sandbox sessions of this machine."""
    max_turns: int = 50
    """Maximum completions per episode; after the last, the tests run on the files as they are."""
    timeout_s: float = 120.0
    """Seconds that the commands of one completion may run."""
    tests_timeout_s: float = 1800.0
    """Seconds that the tests may run."""
    memory_mib: int = 4096
    """Memory of a session, of which a quarter may be changed files."""
    tool: bool = False
    """Show the model the schema of `shell`, for models trained to call tools. Blocks work as well."""
    held_out_share: float = 0.1
    """Share of held-out tasks; which ones depends only on their problems."""
    settings: CodeSettings = field(init=False, repr=False)
    tasks: Sequence[Task] = field(init=False, repr=False, compare=False)
    """All tasks of the file."""

    def __post_init__(self) -> None:
        limits = {"minimum": {"memory_mib": 64, "held_out_share": 0}, "above": {"tests_timeout_s": 0}}
        check_flags(self, "--env swebench:", **limits, below={"held_out_share": 1})
        check_provider(self.provider, "--env swebench:")
        settings = CodeSettings(
            flag="--env swebench:",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            instruction="" if self.tool else _IN_BLOCKS.format(folder=self.folder),
            languages=SHELL,
            shows_schema=self.tool,
        )
        object.__setattr__(self, "settings", settings)
        rows = RowSettings(image=self.image, folder=self.folder, command=self.command, local=self.local)
        object.__setattr__(self, "tasks", read_rows(Path(self.file).expanduser(), rows))

    def __call__(self, task: Task) -> CodeWorld:
        """Make the environment of one episode."""
        return CodeWorld(self.settings, task, tool=SHELL_TOOL, session=self.container(task))

    def container(self, task: Task) -> ContainerSession:
        """Return the container of one episode, also for an agent that works in it."""
        check_own_task(task, "script", "--env swebench")
        truth: Mapping[str, Any] = task.truth
        memory = self.memory_mib << 20
        limits = Limits(
            memory_bytes=memory,
            processes=_PROCESSES,
            scratch_bytes=memory // _SHARE,
            scratch_files=_FILES,
            transfer_bytes=memory // _SHARE,
            output_bytes=_OUTPUT_BYTES,
        )
        container = Container(
            reference=truth["image"],
            store=self.images,
            limits=limits,
            timeout_s=self.timeout_s,
            folder=self.folder,
            provider=self.provider,
        )
        return ContainerSession(container, _RowTests(task, self), hidden=truth["hidden"])

    def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
        """Begin to fetch the images of coming tasks; see `ImageLookahead.prepare`."""
        references = [str(task.truth["image"]) for task in tasks]
        return {} if self.provider else image_lookahead(self.images).prepare(references)

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
            SandboxError: this machine cannot isolate sessions.
            ConfigError: no interpreter with swebench can be made, and a row needs one.
        """
        for task in self.tasks:
            task_image(str(task.truth["image"]), local=self.local, provider=self.provider)
        if self.provider:
            container_provider(self.provider)
        else:
            check_layers("process")
        if any(task.truth["parser"] for task in self.tasks):
            # Before the run, as the interpreter may have to be made, which may fail.
            self.parser_python()
        train, held_out = split(self.tasks, self.held_out_share, key=lambda task: task.prompt)
        name = f"swebench:{Path(self.file).stem}"
        return {name: TaskList(name, train, held_out, seed=seed)}

    def parser_python(self) -> Path:
        """Return an interpreter with the package swebench, which is made on first use."""
        return interpreter([_REQUIRED], python=self.python, flag="--env swebench:FILE,python=PATH")


class _RowTests:
    """Runs the test script of a row, and reads its log."""

    def __init__(self, task: Task, config: SweBenchEnv) -> None:
        self._truth: Mapping[str, Any] = task.truth
        self._config = config

    async def __call__(self, session: JudgeSession, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        """Run the tests; see `worlds.container.Judge`."""
        tests = [*self._truth["fail_to_pass"], *self._truth["pass_to_pass"]]
        # The script comes first, as the model's files may fill the session.
        await session.put("/eval.sh", self._truth["script"].encode())
        try:
            await session.apply(self._counted(attempt.changes))
        except SandboxError:
            if session.lost or not session.alive:
                raise
            return 0.0, {"tests_passed": 0.0}
        result = await session.run(
            ["/bin/bash", "-c", "exec /bin/bash /eval.sh 2>&1"],
            wall_s=self._config.tests_timeout_s,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
        )
        # A timeout or too much memory: the fault of what was tested.
        if result.error is not None:
            return 0.0, {"tests_passed": 0.0}
        passed = await self._passed(result.stdout, tests)
        return float(passed == set(tests)), {"tests_passed": len(passed) / len(set(tests))}

    def _counted(self, changes: Sequence[Change]) -> list[Change]:
        """Return the changes of the repository that touch neither tests nor what configures or loads them."""
        # Paths of changes are relative to the image's root.
        folder = posixpath.normpath(self._truth["folder"]).strip("/")
        relative = [
            Change(path=change.path[len(folder) + 1 :], before=change.before, after=change.after)
            for change in changes
            if change.path.startswith(f"{folder}/") and not change.path.startswith(f"{folder}/.git/")
        ]
        # Relative to the repository, as the changes are.
        hidden = [path[len(folder) + 2 :] for path in self._truth["hidden"] if path.startswith(f"/{folder}/")]
        tests = RepositoryTests(
            tests=[test for test in self._truth["fail_to_pass"] if "::" in test and not test.startswith(("/", ".."))],
            command="eval.sh",
            patch=self._truth["test_patch"],
            protected=[path.partition("/")[0] for path in hidden],
        )
        return [
            Change(path=f"{folder}/{change.path}", before=change.before, after=change.after)
            for change in tests.counted(relative)
        ]

    async def _passed(self, log: str, tests: Sequence[str]) -> set[str]:
        """Return the tests that passed. One that is also listed as failed has not: the tested code can print, too."""
        body = log.partition(START)[2].partition(END)[0]
        # A parser keeps the last status of each test. Read backwards as well, it shows the first one too.
        backwards = "\n".join(reversed(body.splitlines()))
        truth = self._truth
        if truth["parser"]:
            backwards_log = f"{START}\n{backwards}\n{END}\n"
            try:
                answer = await self._parsed([log, backwards_log])
            except InfrastructureError:
                await self._parsed([f"{START}\n{END}\n"])  # raises if the parser fails for any log
                return set()
            passed, statuses = set(answer["passed"]), answer["statuses"][1] or {}
        else:
            end = log.rpartition(EXIT_CODE)[2].strip(": \n").split()
            forwards = statuses_of(body, short_names=truth["short_names"])
            statuses = statuses_of(backwards, short_names=truth["short_names"])
            is_whole = START in log and END in log and bool(end)
            has_failed = any(status in FAILED for status in forwards.values())
            # A failed run that lists no failed test was cut short, maybe by the code that it tested.
            if not is_whole or (end[0] != "0" and not has_failed):
                return set()
            passed = set(passed_tests(forwards, truth["fail_to_pass"], truth["pass_to_pass"]))
        return {test for test in passed if statuses.get(test) not in FAILED} & set(tests)

    async def _parsed(self, logs: Sequence[str]) -> dict[str, Any]:
        """Parse logs in a process of swebench's interpreter, which holds nothing that a hostile log could reach.

        Raises:
            InfrastructureError: the process failed, or took too long.
        """
        truth = self._truth
        row = {
            "instance_id": truth["id"],
            "image": truth["image"],
            "repo": truth["repo"],
            "version": truth["version"],
            "FAIL_TO_PASS": truth["fail_to_pass"],
            "PASS_TO_PASS": truth["pass_to_pass"],
            "log_parser": truth["parser"],
            "eval_type": truth["eval_type"],
        }
        python = await asyncio.to_thread(self._config.parser_python)
        process = await asyncio.create_subprocess_exec(
            str(python),
            "-I",
            str(_PARSER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Nothing of this process's environment, which may hold keys.
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        try:
            async with asyncio.timeout(_PARSE_S):
                out, err = await process.communicate(json.dumps({"row": row, "logs": list(logs)}).encode())
            answer = json.loads(out)
        except (TimeoutError, ValueError, RecursionError) as error:
            cause = "it took too long" if isinstance(error, TimeoutError) else err.decode("utf-8", "replace")[-300:]
            raise InfrastructureError(
                f"swebench could not read the log of {truth['id']}: {cause}", hint="see --env swebench:FILE,python=PATH"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return dict(answer)
