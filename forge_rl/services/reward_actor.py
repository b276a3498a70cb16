"""The Reward service's actor: calls reward functions in its own process."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, SupportsFloat

from monarch.actor import concurrent_endpoint

from forge_rl.errors import DeadlineError, ForgeError, HangError
from forge_rl.rewards.by_source import RewardBySource
from forge_rl.rewards.protocol import Form, RewardFunction, form_of, is_async, text_for
from forge_rl.runtime.actor import ServiceActor
from forge_rl.services.user_thread import StuckError, UserThread
from forge_rl.system.tasks import in_own_task
from forge_rl.types import Episode, Score, Task

REWARD_STUCK = 72
"""Exit status of a process whose reward function did not return."""


class RewardActor(ServiceActor):
    """One scoring process: async functions run concurrently, synchronous ones in a thread, one at a time.

    Args:
        deadline_s: timeout of a function. A thread cannot be killed, so the process exits instead.
        index: the replica's number, for errors.
    """

    def __init__(self, deadline_s: float, index: int) -> None:
        self._deadline_s = deadline_s
        self._index = index
        self._functions: dict[int, dict[str, tuple[RewardFunction, Form]]] = {}
        """Functions with their forms by part name, by version."""
        self._thread = UserThread(deadline_s, exit_status=REWARD_STUCK)

    @concurrent_endpoint
    async def replace(
        self, functions_by_version: Mapping[int, Mapping[str, RewardFunction]], folder: Path | None
    ) -> None:
        """Adopt the functions of these versions and drop all others."""
        new_functions = {
            version: functions for version, functions in functions_by_version.items() if version not in self._functions
        }
        for functions in new_functions.values():
            for function in functions.values():
                load = getattr(function, "load", None)
                if callable(load):
                    await asyncio.to_thread(load, folder)
        # Kept as they are: a version that is in use must not lose what its functions have loaded.
        kept_functions = {
            version: functions for version, functions in self._functions.items() if version in functions_by_version
        }
        self._functions = kept_functions | {
            version: _with_forms(functions) for version, functions in new_functions.items()
        }

    async def score(
        self, version: int, task: Task, inputs: Sequence[str | Episode]
    ) -> tuple[dict[str, list[Score]], dict[str, float]]:
        """Score a task's episodes, or their answers' texts, with each function of a version; returns the scores by
        function, and metrics of the process since the last call."""
        functions = self._functions.get(version)
        # Replicas know the current functions and their replacement; an older call comes too late.
        if functions is None:
            raise ForgeError("the reward was replaced before this was scored", hint="score it again")
        scores = await asyncio.gather(
            *(self._apply(*function_and_form, task, inputs) for function_and_form in functions.values())
        )
        return dict(zip(functions, scores, strict=True)), _sandbox_metrics()

    async def _apply(
        self, function: RewardFunction, form: Form, task: Task, inputs: Sequence[str | Episode]
    ) -> list[Score]:
        """Score episodes with one function, in the form that it accepts."""
        if isinstance(function, RewardBySource):
            # Resolved here, so that a synchronous reward runs in the thread instead of blocking the event loop.
            function = function.reward_of(task)
            form = form_of(function)
        # If one part of a sum needs whole episodes, the others get their texts from these.
        if form == "text":
            inputs = [x if isinstance(x, str) else text_for(function, x) for x in inputs]
        if form == "group":
            results = await self._call(function, task, inputs)
            if not isinstance(results, Sized) or isinstance(results, str) or len(results) != len(inputs):
                raise ForgeError(
                    f"the reward of {task.id} is {results!r:.100} for {len(inputs)} episodes",
                    hint="return a sequence with a score for each episode",
                )
        else:
            results = await asyncio.gather(*(self._call(function, task, x) for x in inputs))
        return [_as_score(result, task) for result in results]

    async def _call(self, function: RewardFunction, task: Task, argument: object) -> Any:
        result: Any = (
            function(task, argument)  # type: ignore[arg-type]
            if is_async(function)
            else await self._in_thread(function, task, argument)
        )
        if inspect.isawaitable(result):
            deadline_s: float = getattr(function, "deadline_s", self._deadline_s)
            try:
                async with asyncio.timeout(deadline_s) as limit:
                    result = await in_own_task(result)
            except TimeoutError:
                # A TimeoutError that the function itself raised is its own error, not a missed deadline.
                if limit.expired():
                    raise self._late(DeadlineError, task, deadline_s) from None
                raise
        return result

    async def _in_thread(self, function: Callable[..., object], task: Task, argument: object) -> object:
        def run() -> object:
            try:
                return function(task, argument)
            except StopIteration as error:
                # No future can hold a StopIteration, so it is replaced here, where the task is known.
                raise ForgeError(
                    f"the reward of {task.id} raised StopIteration", hint="give next() a default value"
                ) from error

        try:
            return await self._thread.call(run, self._link_end.in_hand)
        except StuckError as stuck:
            raise self._late(HangError, task, self._deadline_s, str(stuck)) from None

    def _late(self, kind: type[DeadlineError], task: Task, deadline_s: float, line: str = "") -> DeadlineError:
        return kind(
            f"no answer within {deadline_s:g} s for {task.source} {task.id}{line}",
            service="reward",
            replica=self._index,
            call="score",
            hint="make the reward function faster, or raise --reward.deadline-s",
        )


def _with_forms(functions: Mapping[str, RewardFunction]) -> dict[str, tuple[RewardFunction, Form]]:
    return {name: (function, form_of(function)) for name, function in functions.items()}


def _sandbox_metrics() -> dict[str, float]:
    """Return counts of how the functions' sandbox sessions started; {} without the sandbox, which only functions that
    run code import."""
    shared = sys.modules.get("forge_rl.sandbox.shared")
    return {} if shared is None else shared.pop_opened_sessions()


def _as_score(result: object, task: Task) -> Score:
    if isinstance(result, Score):
        return result
    try:
        if not isinstance(result, SupportsFloat):
            raise TypeError("no number")
        return Score(total=float(result))
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors with several values
        raise ForgeError(
            f"the reward of {task.id} is {result!r:.100}", hint="return a number or a Score from the reward function"
        ) from None
