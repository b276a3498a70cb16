"""Unmodified environments of the verifiers package, run as agents under an interpreter of their own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import platform
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_rl.envs.protocol import Policy
from forge_rl.envs.task_list import TaskList, check_own_task, split
from forge_rl.envs.worker import Worker
from forge_rl.errors import ConfigError, ForgeError, ReplicaError, check_flags
from forge_rl.sandbox.inside.seccomp import ARCHITECTURES, session_filter
from forge_rl.system.interpreters import interpreter
from forge_rl.system.variables import handed_on
from forge_rl.types import Episode, Message, Score, Task

PACKAGE = "verifiers>=0.4,<0.5"
_SCRIPT = Path(__file__).parent / "peers" / "verifiers_worker.py"
_LIST_S = 600.0
"""Timeout for loading an environment and listing its tasks, which may download data."""
_PING_S = 10.0
"""Seconds between pings of a worker."""
_AGAIN_S = 1.0
"""Delay before restarting a worker that failed to start, in seconds."""


@dataclass(frozen=True, kw_only=True)
class VerifiersSettings:
    """How `VerifiersEnv` runs an environment, with any taskset; options of `--env verifiers:NAME`."""

    python: str = ""
    """An interpreter with verifiers and the environment; by default one is made with uv and kept."""
    package: str = ""
    """Packages to install there in addition to verifiers: names or folders, separated by spaces."""
    workers: int = 1
    """Number of processes that share the episodes."""
    harness: str = ""
    """The verifiers harness; by default the environment's own, or else a plain chat loop with its tools."""
    confine: bool = True
    """Run the programs of a harness, and of scoring, under bubblewrap: as a user of their own (if this is root), with
    their own folder, and without a network but the policy and the environment's tools."""
    max_turns: int = 32
    """Maximum completions of an agent per episode."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Additional verifiers configuration, such as {"max_concurrent_agents": 2}."""
    eval: Mapping[str, Any] = field(default_factory=dict)
    """Taskset options that select the held-out tasks, such as {"split": "test"}."""
    held_out_share: float = 0.1
    """Share of tasks to hold out if `eval` is not set."""
    most_tasks: int = 10_000
    """Maximum number of tasks to read from the taskset, which may be endless."""
    hang_s: float = 300.0
    """Seconds without any answer after which a worker is replaced."""

    def __post_init__(self) -> None:
        minimums = {"workers": 1, "max_turns": 1, "held_out_share": 0, "most_tasks": 1}
        check_flags(self, "--env verifiers:", minimum=minimums, above={"hang_s": 0}, below={"held_out_share": 1})


class VerifiersEnv:
    """A verifiers 0.4 environment: provides tasks, runs their episodes as an agent, and scores them.

        environment = VerifiersEnv("reverse_text", VerifiersSettings(package="./environments/reverse_text"))
        async with start(config, sources=Mixture(environment.sources(0)), environment=environment, ...) as run:

    Its workers call the policy at the gateway with each episode's key. If several agents play the policy, the reward is
    their mean; games whose agents' rewards always add up to the same are refused, as it would never change.

    Args:
        name: the taskset, a module that the interpreter can import, such as `reverse_text` or `textarena`.
        settings: how it is run.
        options: options of the taskset.
    """

    def __init__(self, name: str, settings: VerifiersSettings | None = None, **options: Any) -> None:
        settings = settings or VerifiersSettings()
        self.name = name
        self.settings = settings
        self._python = interpreter([PACKAGE, "uv", *settings.package.split()], python=settings.python)
        self._workers: list[asyncio.Task[Worker]] = []
        # Episodes go to the workers in turn.
        self._turns = itertools.count()
        self._config: dict[str, Any] = {
            "taskset": {"id": name, **options},
            "env": dict(settings.env),
            "harness": settings.harness,
            "max_turns": settings.max_turns,
            "most_tasks": settings.most_tasks,
            "confine": settings.confine,
            # Without a filter for this processor, namespaces alone confine programs.
            "filter": session_filter(has_network=True).hex() if platform.machine() in ARCHITECTURES else "",
        }

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return the task source.

        Raises:
            ConfigError: verifiers cannot load the taskset; gives the cause.
        """
        name = f"verifiers:{self.name}"
        tasks = self._list({}, "")
        if self.settings.eval:
            # The prefix keeps the ids of the two lists apart.
            train, held_out = tasks, self._list(self.settings.eval, "eval/")
        else:
            train, held_out = split(tasks, self.settings.held_out_share, key=lambda task: str(task.truth["key"]))
        return {name: TaskList(name, train, held_out, seed=seed)}

    @staticmethod
    def reward(task: Task, episode: Episode) -> Score:
        """Score an attempt that timed out before it had a score."""
        return Score(total=0.0)

    async def agent(self, task: Task, policy: Policy) -> Score:
        """Run one episode.

        Raises:
            ReplicaError: the worker's process died, or did not start again.
            ForgeError: the environment failed; gives the cause.
        """
        if not self._workers:
            raise ForgeError(f"no worker of {self.name} is running", hint="use the environment within `serving`")
        check_own_task(task, "data", "--env verifiers")
        try:
            # All episodes of a worker wait for one start, which a cancelled one must not end.
            worker = await asyncio.shield(self._workers[next(self._turns) % len(self._workers)])
        except ForgeError as error:
            # The next start may succeed: this is no failure of the task.
            raise ReplicaError(error.message, service=f"verifiers:{self.name}", hint=error.hint) from error
        result: Any = await worker.call({"task": task.truth["data"], "base_url": policy.base_url, "key": policy.key})
        return Score(total=result["reward"], parts=result["parts"], answer=result["answer"])

    @contextlib.asynccontextmanager
    async def serving(self, logs: Path) -> AsyncIterator[None]:
        """Run the workers while the body runs, replacing those that die or hang.

        Raises:
            ForgeError: a worker does not start; gives the cause.
        """
        self._workers = [self._start(index, logs) for index in range(self.settings.workers)]
        watch_tasks = [asyncio.ensure_future(self._watch(index, logs)) for index in range(self.settings.workers)]
        try:
            # A worker that cannot start fails the run here, instead of its first episode.
            await asyncio.gather(*self._workers)
            yield
        finally:
            for task in (*watch_tasks, *self._workers):
                task.cancel()
            await asyncio.gather(*watch_tasks, return_exceptions=True)
            for worker in await asyncio.gather(*self._workers, return_exceptions=True):
                if isinstance(worker, Worker):
                    await worker.close()
            self._workers = []

    def _start(self, index: int, logs: Path) -> asyncio.Task[Worker]:
        # -E leaves out PYTHONPATH, which is for our interpreter.
        command = [str(self._python), "-E", str(_SCRIPT), "serve", json.dumps(self._config)]
        log = logs / f"verifiers-{index}.log"
        return asyncio.ensure_future(Worker.start(f"verifiers:{self.name}", command, log=log))

    async def _watch(self, index: int, logs: Path) -> None:
        """Ping a worker periodically; if it died or hangs, start another one, which later episodes wait for."""
        while True:
            try:
                worker = await asyncio.shield(self._workers[index])
                async with asyncio.timeout(self.settings.hang_s):
                    await worker.call({"ping": True})
            except TimeoutError:
                # The worker hangs. Killing it fails its episodes with a ReplicaError, upon which they are retried.
                await worker.close()
            except ForgeError:  # it did not start, or died
                await asyncio.sleep(_AGAIN_S)
            else:
                if not await worker.ended(within_s=_PING_S):
                    continue
            self._workers[index] = self._start(index, logs)

    def _list(self, options: Mapping[str, Any], prefix: str) -> list[Task]:
        config = self._config | {"taskset": self._config["taskset"] | dict(options)}
        # In the interpreter of the environment: ours cannot import it.
        rows, error = _run_list(str(self._python), json.dumps(config))
        if error:
            raise ConfigError(
                f"verifiers cannot load {self.name!r} under {self._python}:\n{error}",
                hint="fix its options, install missing packages there, or name them with package=PACKAGE",
            )
        return [
            Task(
                id=f"{prefix}{row['id']}",
                source=f"verifiers:{self.name}",
                messages=tuple[Message, ...](row["messages"]),
                truth={"data": row["data"], "key": row["key"]} | _answer_in(row["data"]),
            )
            for row in rows
        ]


def _answer_in(data: Mapping[str, Any]) -> dict[str, object]:
    """Return the row's correct answer, if any, under the key that other sources use."""
    return {"answer": data["answer"]} if data.get("answer") not in (None, "") else {}


@functools.cache
def _run_list(python: str, config: str) -> tuple[list[Any], str]:
    """List the tasks; return the rows, and the script's last lines if it failed. Cached, as a recipe may ask again."""
    command = [python, "-E", str(_SCRIPT), "list", config]  # -E: PYTHONPATH is for our interpreter
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIST_S, env=handed_on()
        )
    except subprocess.TimeoutExpired:
        return [], f"it took longer than {_LIST_S:g} s"
    if result.returncode:
        return [], "\n".join(result.stderr.strip().splitlines()[-6:])
    return [json.loads(line) for line in result.stdout.splitlines()], ""
