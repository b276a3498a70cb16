"""Live settings: settings that can change during a run, with events for changes and restoration on resume."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.run_dir import read_object, write_json
from forge_rl.services.reward import Reward, RewardFunction

_LIVE_BOUNDS = ("max_lag", "over_sampling", "max_episodes")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_whose: ContextVar[str] = ContextVar("whose", default="")
"""Author of a change, for the events; "" for code in this process."""

BuildReward = Callable[[Sequence[str]], RewardFunction]
"""Builds a reward from strings as in `--reward`."""


@contextlib.contextmanager
def changes_by(whose: str) -> Iterator[None]:
    """Name the author of the body's changes in the events."""
    token = _whose.set(whose)
    try:
        yield
    finally:
        _whose.reset(token)


class LiveSchedule:
    """The schedule of a live run: settings are readable, and bounds can be set.

        run.schedule.max_lag = 2  # from the next batch on

    A lower bound applies from the next batch on: episodes in flight that are too old for it are replaced.

    Raises:
        ConfigError: the value is out of range, or the setting cannot change in a live run.
    """

    max_lag: int
    over_sampling: float
    max_episodes: int

    def __init__(self, rollouts: RolloutExecutor, changed: Callable[[str], None]) -> None:
        vars(self).update(_rollouts=rollouts, _changed=changed)

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["_rollouts"].config, name)

    def __setattr__(self, name: str, value: object) -> None:
        rollouts: RolloutExecutor = vars(self)["_rollouts"]
        before = getattr(rollouts.config, name, None)
        if name not in _LIVE_BOUNDS:
            raise ConfigError(
                f"the schedule's {name!r} cannot change in a live run", hint=f"set one of {', '.join(_LIVE_BOUNDS)}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float) if isinstance(before, float) else int):
            raise ConfigError(
                f"the schedule's {name} is set to {value!r}", hint="set it to a number of the current value's type"
            )
        if name == "max_lag" and rollouts.config.kind in ("synchronous", "one_step"):
            raise ConfigError(
                f"the schedule {rollouts.config.kind} has a fixed lag, which no bound changes",
                hint="start the run with --schedule.kind pipelined or asynchronous",
            )
        rollouts.config = replace(rollouts.config, **{name: value})  # type: ignore[arg-type]
        vars(self)["_changed"](f"schedule {name} {before:g} -> {value:g}, from the next batch on")

    def __repr__(self) -> str:
        config = vars(self)["_rollouts"].config
        return "\n".join(
            [f"Schedule  {config.kind}", *(f"  {name} {getattr(config, name):g}" for name in _LIVE_BOUNDS)]
        )


class LiveSettings:
    """Live mixture weights, reward and schedule bounds: logs each change as an event, and saves the changes.

    Changes are written to `live.json` immediately, and into each checkpoint; a resumed run restores all of them,
    including those after its checkpoint. A live change overrides an unchanged flag; a flag that the resuming command
    changes overrides the live change.

    Args:
        path: file for the changes since the last checkpoint.
        step: returns the number of finished steps.
        adapting: the mixture's adaptation as set by flags.
        build_reward: builds a reward from strings.
        tell: called with a line for the events.
    """

    def __init__(
        self,
        path: Path,
        *,
        step: Callable[[], int],
        mixture: Mixture,
        adapting: Adapting,
        reward: Reward,
        rollouts: RolloutExecutor,
        build_reward: BuildReward,
        tell: Callable[[str], None],
    ) -> None:
        self._mixture, self._adapting, self._reward, self._rollouts = mixture, adapting, reward, rollouts
        self._path, self._step = path, step
        self._build_reward = build_reward
        self._tell = tell
        self._built: tuple[RewardFunction, list[str]] | None = None
        """The last reward built from strings, and these strings."""
        self._now = self.reward
        self._given: dict[str, object] = {
            "schedule": {name: getattr(rollouts.config, name) for name in _LIVE_BOUNDS},
            "weights": {name: mixture[name] for name in mixture},
            "mixture": asdict(adapting),
            "reward": _ADDRESS.sub("", repr(reward.function)),
        }
        """Values set by this command's flags."""
        if adapting.adapt != "off":
            mixture.adapt(adapting)
        self._mixture_touched = self._resuming = False
        self.schedule = LiveSchedule(rollouts, self._changed)
        mixture.changed.append(self._mixture_changed)
        reward.replaced.append(self._reward_changed)

    @property
    def reward(self) -> str:
        """Description of the current reward: the strings that it was built from, or the name of its function."""
        function = self._reward.function
        if self._built is not None and self._built[0] is function:
            return " ".join(self._built[1])
        return _importable(function) or (
            type(function).__name__ if is_dataclass(function) else _ADDRESS.sub("", repr(function))
        )

    async def replace_reward(self, texts: Sequence[str]) -> None:
        """Score with another reward from now on.

        Args:
            texts: strings as in `--reward`.

        Raises:
            ForgeError: the function does not exist, or cannot be sent to the scoring processes.
        """
        function = await asyncio.to_thread(self._build_reward, texts)  # may import for a long time
        previous, self._built = self._built, (function, list(texts))
        try:
            await self._reward.replace(function)
        except BaseException:
            self._built = previous
            raise

    def state(self) -> dict[str, object]:
        """Return the flags' values and the changes since, as JSON; the mixture's weights are in its own state."""
        reward: dict[str, object] | None = None
        if _ADDRESS.sub("", repr(self._reward.function)) != self._given["reward"]:
            built = self._built[1] if self._built and self._built[0] is self._reward.function else None
            name = _importable(self._reward.function)
            reward = {"name": self.reward, "texts": built or ([name] if name else None)}
        bounds = {name: getattr(self._rollouts.config, name) for name in _LIVE_BOUNDS}
        return {"given": self._given, "schedule": bounds, "reward": reward, "mixture": self._mixture_touched}

    def mixture_now(self) -> dict[str, object]:
        """Return the parts of the mixture's state that a rollback keeps, because they were changed live."""
        state = self._mixture.state() if self._mixture_touched else {}
        return {name: state[name] for name in ("weights", "adaptive") if name in state}

    def unsaved(self, step: int) -> tuple[object, dict[str, object]] | None:
        """Read the changes that an earlier process made after the checkpoint of a step; None if there are none.

        Returns:
            A state for `resume`, and parts of a mixture's state.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self._path.exists():
            return None
        try:
            match read_object(self._path):
                case {"step": int(made_at), "live": live, "mixture": dict(mixture)} if is_live_state(live):
                    return (live, mixture) if made_at >= step else None
            raise ConfigError("it lacks something")
        except ConfigError as error:
            raise CheckpointError(
                f"live changes cannot be read from {self._path}: {error.message}",
                hint=f"delete {self._path} to resume without the changes since the last checkpoint",
            ) from error

    async def resume(self, state: Any) -> None:
        """Reapply live changes of a resumed run, whose mixture has been restored already.

        Args:
            state: result of `state` or `unsaved`; None if nothing was changed.

        Raises:
            ForgeError: a reward does not exist any more.
        """
        if state is not None:
            self._resuming = True
            with changes_by("as it was changed live"):
                await self._resume(state)
            self._resuming, self._mixture_touched = False, state["mixture"]
        elif self._adapting.adapt != self._mixture.adapting.adapt:  # from a version before adaptive mixtures
            self._mixture.adapt(self._adapting)
        if self._path.exists():
            self._save()  # with the current flags

    async def _resume(self, state: dict[str, Any]) -> None:
        given, reward = state["given"], state["reward"]
        self._resume_schedule(given["schedule"], state["schedule"])
        self._resume_mixture(given["weights"], given["mixture"])
        if reward is None:
            pass
        elif given["reward"] != self._given["reward"]:
            self._tell(
                f"the current flags set the reward {self.reward}, which overrides the live change to {reward['name']}"
            )
        elif reward["texts"] is None:
            self._tell(f"the reward was replaced live by {reward['name']}, which is not in this process: set it again")
        else:
            await self.replace_reward(reward["texts"])

    def close(self) -> None:
        """Stop reporting changes; the mixture may be reused."""
        self._mixture.changed.remove(self._mixture_changed)

    def _resume_schedule(self, given: Mapping[str, object], bounds: Mapping[str, object]) -> None:
        config = self._rollouts.config
        taken = {}
        for name in _LIVE_BOUNDS:
            flag, live = getattr(config, name), bounds[name]
            if live == given[name] or live == flag:  # not changed live, or equal to the current flag
                continue
            if given[name] == flag:
                taken[name] = live
            else:
                self._tell(
                    f"the current flags set schedule {name} {flag:g}, which overrides the live change to {live:g}"
                )
        if taken:
            self._rollouts.config = replace(config, **taken)  # type: ignore[arg-type]
            self._changed(", ".join(f"schedule {name} {getattr(config, name):g} -> {taken[name]:g}" for name in taken))

    def _resume_mixture(self, weights: object, adapting: object) -> None:
        """Apply mixture flags that changed since the checkpoint to a restored mixture."""
        given = self._given["weights"]
        assert isinstance(given, dict)
        if weights != given:
            with changes_by("by the current flags"):
                self._mixture.adapt(Adapting())
                for name, weight in sorted(given.items(), key=lambda item: -item[1]):  # never all 0
                    self._mixture[name] = weight
        if adapting != self._given["mixture"] or (weights != given and self._adapting.adapt != "off"):
            with changes_by("by the current flags"):
                self._mixture.adapt(self._adapting)
        elif self._mixture.adapting != self._adapting:
            self._changed(f"mixture adapts: {self._mixture.adapting.adapt}")
        for name, weight in given.items() if self._mixture.adapting.adapt == "off" else ():
            if self._mixture[name] != weight:
                self._changed(f"mixture {name} {weight:g} -> {self._mixture[name]:g}")

    def _mixture_changed(self, line: str) -> None:
        self._mixture_touched = True
        self._changed(line)

    def _reward_changed(self) -> None:
        before, self._now = self._now, self.reward
        self._changed(f"reward {before} -> {self._now}")

    def _changed(self, line: str) -> None:
        whose = _whose.get()
        self._tell(f"{line} ({whose})" if whose else line)
        if not self._resuming:
            self._save()

    def _save(self) -> None:
        try:
            write_json(self._path, {"step": self._step(), "live": self.state(), "mixture": self.mixture_now()})
        except OSError as error:
            self._tell(f"live changes are not saved until the next checkpoint: {error.strerror or error}")


def _importable(function: object) -> str:
    """Return a function's `module:name`, by which another process can import it; "" if it cannot."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None) if module != "__main__" else None
    return f"{module}:{name}" if found is function and name else ""


def is_live_state(state: object) -> bool:
    """Return whether a value from a possibly corrupt file has the form that `LiveSettings.state` returns."""
    match state:
        case {
            "given": {"schedule": dict(given), "weights": dict(weights), "mixture": dict(), "reward": str()},
            "schedule": dict(bounds),
            "reward": None | {"name": str(), "texts": None | list()} as reward,
            "mixture": bool(),
        }:
            bounds_of_both = [part.get(name) for part in (given, bounds) for name in _LIVE_BOUNDS]
            numbers = all(type(number) in (int, float) for number in (*bounds_of_both, *weights.values()))
            return numbers and all(isinstance(text, str) for text in (reward or {}).get("texts") or ())
    return False
