"""The live knobs of a run: settings that code or attached clients change while it runs, and that a resumed run keeps.

`given` holds a knob's values by this command's flags. `read` returns the current values, and `write` sets a client's,
raising ForgeErrors. `changes` returns the live changes to save, and `resume` reapplies the changes of an earlier
process. All values are JSON. A live change overrides an unchanged flag; a flag that the resuming command changes
overrides the live change.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, Protocol

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.errors import ConfigError
from forge_rl.flags.user_code import name_of, shown
from forge_rl.rewards.composition import described
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.attach import LiveSchedule
from forge_rl.services.reward import RewardFunction, RewardService
from forge_rl.services.trainer import Trainer
from forge_rl.system.listeners import Listeners

_BOUNDS = ("max_lag", "over_sampling", "max_episodes")
_MOST = {"max_lag": 1000, "max_episodes": 1_000_000}
"""Largest values of bounds in a live run; the settings themselves limit the others."""
_MOST_LR = 0.1
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_author: ContextVar[str] = ContextVar("author", default="")
"""Author of a change, for the events; "" for code in this process."""


@contextlib.contextmanager
def changes_by(author: str) -> Iterator[None]:
    """Name the author of the body's changes in the events."""
    token = _author.set(author)
    try:
        yield
    finally:
        _author.reset(token)


class ScheduleKnob:
    """Bounds of the schedule. A lower bound replaces episodes in flight that are too old for it."""

    def __init__(self, rollouts: RolloutExecutor, changed: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self._rollouts = rollouts
        self._changed = changed
        self._tell = tell
        self.given: dict[str, Any] = {name: getattr(rollouts.config, name) for name in _BOUNDS}

    def read(self) -> dict[str, Any]:
        return vars(self._rollouts.config)

    async def write(self, values: dict[str, Any]) -> None:
        self.set(values)

    def set(self, values: Mapping[str, Any]) -> None:
        """Set bounds from the next batch on.

        Raises:
            ConfigError: a value is out of range, or the setting cannot change in a live run.
        """
        config = self._rollouts.config
        for name, value in values.items():
            if name not in _BOUNDS:
                raise ConfigError(
                    f"the schedule's {name!r} cannot change in a live run", hint=f"set one of {', '.join(_BOUNDS)}"
                )
            kinds = (int, float) if isinstance(getattr(config, name), float) else int
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ConfigError(
                    f"the schedule's {name} is set to {value!r}", hint="set it to a number of the current value's type"
                )
            if name == "max_lag" and config.kind in ("synchronous", "one_step"):
                raise ConfigError(
                    f"the schedule {config.kind} has a fixed lag, which no bound changes",
                    hint="start the run with --schedule.kind pipelined or asynchronous",
                )
            if name in _MOST and value > _MOST[name]:
                raise ConfigError(f"the schedule's {name} is set to {value}", hint=f"set it to at most {_MOST[name]}")
        self._rollouts.config = replace(config, **values)
        lines = (f"schedule {name} {getattr(config, name):g} -> {value:g}" for name, value in values.items())
        self._changed(f"{', '.join(lines)}, from the next batch on")

    def changes(self) -> dict[str, Any]:
        config = self._rollouts.config
        return {name: getattr(config, name) for name in _BOUNDS if getattr(config, name) != self.given[name]}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        differences = {name: live for name, live in changes.items() if live != self.given[name]}
        for name, live in differences.items():
            if (flag := self.given[name]) != old_flags[name]:
                self._tell(
                    f"the current flags set schedule {name} {flag:g}, which overrides the live change to {live:g}"
                )
        if bounds := {name: live for name, live in differences.items() if self.given[name] == old_flags[name]}:
            try:
                self.set(bounds)
            except ConfigError as error:  # accepted by an earlier version
                self._tell(f"live changes of the schedule no longer apply: {error.message}")


class MixtureKnob:
    """Weights of the sources, and how they adapt. The mixture's own state, restored before `resume`, holds both."""

    def __init__(self, mixture: Mixture, adapting: Adapting, changed: Callable[[str], None]) -> None:
        self._mixture = mixture
        self._adapting = adapting
        self._changed = changed
        self._touched = False
        self.given: dict[str, Any] = {
            "weights": {name: mixture[name] for name in mixture},
            "adapting": asdict(adapting),
        }
        if adapting.adapt != "off":
            mixture.adapt(adapting)
        mixture.changed.add(self._mixture_changed)

    def read(self) -> dict[str, Any]:
        return {"weights": {name: self._mixture[name] for name in self._mixture}, "shown": repr(self._mixture)}

    async def write(self, values: dict[str, Any]) -> None:
        match values:
            case {"weights": dict(weights)}:
                for source, weight in weights.items():
                    if isinstance(weight, bool) or not isinstance(weight, int | float):
                        raise ConfigError(f"the weight of {source!r} is {weight!r}", hint="choose a number from 0 up")
                self._mixture.update(weights)
            case {"adapting": dict(settings)}:
                if settings.get("adapt", "off") not in ("off", "success"):
                    raise ConfigError(f"the mixture cannot adapt by {settings['adapt']!r}", hint="set off or success")
                try:
                    config = Adapting(**settings)
                except TypeError as error:
                    raise ConfigError(f"the mixture cannot adapt by {settings}: {error}") from error
                self._mixture.adapt(config)
            case _:
                raise ConfigError(f"the mixture has no {sorted(values)}", hint="set weights, or adapting")

    def changes(self) -> dict[str, Any]:
        state = self._mixture.state() if self._touched else {}
        return {name: state[name] for name in ("weights", "adaptive") if name in state}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        mixture, weights = self._mixture, self.given["weights"]
        reweighted = old_flags["weights"] != weights
        with changes_by("by the current flags"):
            if reweighted:
                mixture.adapt(Adapting())
                for name, weight in sorted(weights.items(), key=lambda item: -item[1]):  # never all 0
                    mixture[name] = weight
            readapted = old_flags["adapting"] != self.given["adapting"] or (
                reweighted and self._adapting.adapt != "off"
            )
            if readapted:
                mixture.adapt(self._adapting)
        if not readapted and mixture.adapting != self._adapting:
            self._changed(f"mixture adapts: {mixture.adapting.adapt}")
        for name, weight in weights.items() if mixture.adapting.adapt == "off" else ():
            if mixture[name] != weight:
                self._changed(f"mixture {name} {weight:g} -> {mixture[name]:g}")
        self._touched = bool(changes)

    def close(self) -> None:
        """Stop reporting changes; the mixture may be reused."""
        self._mixture.changed.discard(self._mixture_changed)

    def _mixture_changed(self, line: str) -> None:
        self._touched = True
        self._changed(line)


class OptimizerKnob:
    """The policy's peak learning rate, from the next step on; the schedule of --trainer.optimizer.decay scales it."""

    def __init__(self, trainer: Trainer, changed: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._changed = changed
        self._tell = tell
        self.given: dict[str, Any] = {"lr": trainer.lr}

    def read(self) -> dict[str, Any]:
        return {"lr": self._trainer.lr}

    async def write(self, values: dict[str, Any]) -> None:
        match values:
            case {"lr": lr} if len(values) == 1:
                self.set(lr)
            case _:
                raise ConfigError(f"the optimizer's {sorted(values)} cannot change in a live run", hint="set lr")

    def set(self, lr: object) -> None:
        """Set the peak learning rate.

        Raises:
            ConfigError: it is not a number within bounds.
        """
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= _MOST_LR:
            raise ConfigError(
                f"the learning rate is set to {lr!r}",
                hint=f"choose a number above 0, at most {_MOST_LR:g}; to stop for a while, pause the run instead",
            )
        old_lr = self._trainer.lr
        self._trainer.lr = float(lr)
        self._changed(f"learning rate {old_lr:g} -> {lr:g}, from the next step on")

    def changes(self) -> dict[str, Any]:
        lr = self._trainer.lr
        return {} if lr == self.given["lr"] else {"lr": lr}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        flag, live = self.given["lr"], changes.get("lr", self.given["lr"])
        if live == flag:
            return
        if flag != old_flags["lr"]:
            self._tell(f"the current flags set the learning rate {flag:g}, which overrides the live change to {live:g}")
        else:
            self.set(live)


class RewardKnob:
    """The reward: strings as in `--reward`, or a function given by code."""

    def __init__(self, reward: RewardService, changed: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self._reward = reward
        self._changed = changed
        self._tell = tell
        self._built: tuple[RewardFunction | None, list[str]] = None, []
        """The last reward built from strings, and these strings."""
        self._now = self.read()
        self.given: dict[str, Any] = {"reward": _without_address(reward.function)}
        reward.replaced.add(self._replaced)

    def read(self) -> str:
        """Describe the current reward: the strings that it was built from, or the name of its function."""
        return " ".join(map(shown, self._texts())) or described(self._reward.function)

    async def write(self, values: dict[str, Any]) -> None:
        match values:
            case {"texts": [*texts]} if texts and all(isinstance(text, str) for text in texts):
                await self._replace(texts)
            case _:
                raise ConfigError(f"the reward is set to {values!r}", hint="set it to a text such as file.py:function")

    def changes(self) -> dict[str, Any]:
        if _without_address(self._reward.function) == self.given["reward"]:
            return {}
        return {"reward": {"name": self.read(), "texts": self._texts()}}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        if not changes:
            return
        name, texts = changes["reward"]["name"], changes["reward"]["texts"]
        if old_flags["reward"] != self.given["reward"]:
            self._tell(f"the current flags set the reward {self.read()}, which overrides the live change to {name}")
        elif not texts:
            self._tell(f"the reward was replaced live by {name}, which is not in this process: set it again")
        else:
            await self._replace(texts)

    async def _replace(self, texts: Sequence[str]) -> None:
        function = await asyncio.to_thread(build_reward, texts)  # may import for a long time
        previous, self._built = self._built, (function, list(texts))
        try:
            await self._reward.replace(function)
        except BaseException:
            self._built = previous
            raise

    def _texts(self) -> list[str]:
        """Return the strings that build the current reward again; [] if there are none."""
        function, (built_function, texts) = self._reward.function, self._built
        if built_function is function and texts:
            return texts
        text = name_of(function)
        return [text] if text else []

    def _replaced(self) -> None:
        old_reward, self._now = self._now, self.read()
        self._changed(f"reward {old_reward} -> {self._now}")


class Scalable(Protocol):
    """A service whose number of replicas can change in a live run."""

    @property
    def replicas(self) -> int: ...

    def scale(self, replicas: int) -> None: ...


class ReplicasKnob:
    """Numbers of engines and of environments' processes on the present hosts; hosts that join or leave change them in
    proportion."""

    def __init__(
        self, services: Mapping[str, Scalable], changed: Callable[[str], None], tell: Callable[[str], None]
    ) -> None:
        self._services = services
        self._changed = changed
        self._tell = tell
        self._set: dict[str, int] = {}
        self.given: dict[str, Any] = self.read()

    def read(self) -> dict[str, Any]:
        return {name: service.replicas for name, service in self._services.items()}

    async def write(self, values: dict[str, Any]) -> None:
        self.set(values)

    def set(self, values: Mapping[str, Any]) -> None:
        """Start or stop replicas until there are as many.

        Raises:
            ConfigError: the run lacks such a service, or room for so many; nothing has then changed.
        """
        for name in values:
            if name not in self._services:
                names = ", ".join(self._services) or "nothing: the run generates no episodes"
                raise ConfigError(f"the run has no {name} to scale", hint=f"scale {names}")
        old_counts = self.read()
        with contextlib.ExitStack() as undo:
            for name, count in values.items():
                self._services[name].scale(count)
                undo.callback(self._services[name].scale, old_counts[name])
            undo.pop_all()
        self._set |= values
        for name, count in values.items():
            self._changed(f"{name} {old_counts[name]} -> {count}")

    def changes(self) -> dict[str, Any]:
        return {name: count for name, count in self._set.items() if count != self.given[name]}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        for name, live in changes.items():
            if name not in self._services or (flag := self.given[name]) == live:
                continue
            if flag != old_flags.get(name):
                self._tell(f"the current flags set {flag} {name}, which overrides the live change to {live}")
                continue
            try:
                self.set({name: live})
            except ConfigError as error:  # there are other hosts now
                self._tell(f"the live change to {live} {name} is not taken up: {error.message}")


class LiveSettings:
    """All knobs of a run: reports each change as an event, and gives the state that a resumed run takes up.

    Args:
        rollouts: None if there are none; the schedule is then no knob.
        adapting: the mixture's adaptation as set by flags.
        reward: None if there is none; it is then no knob.
        trainer: the policy's trainer.
        tell: called with a line for the events.
        scalable: services whose number of replicas can change, by the name that users know.
    """

    def __init__(
        self,
        rollouts: RolloutExecutor | None,
        mixture: Mixture,
        adapting: Adapting,
        reward: RewardService | None,
        trainer: Trainer,
        tell: Callable[[str], None],
        *,
        scalable: Mapping[str, Scalable] | None = None,
    ) -> None:
        self.mixture = mixture
        self.changed = Listeners[[]]()
        """Called after each change."""
        self._tell = tell
        self._resuming = False
        self._mixture = MixtureKnob(mixture, adapting, self._changed)
        self.optimizer = OptimizerKnob(trainer, self._changed, tell)
        self.replicas = ReplicasKnob(scalable or {}, self._changed, tell)
        self.knobs: dict[str, ScheduleKnob | MixtureKnob | RewardKnob | OptimizerKnob | ReplicasKnob] = {}
        self._schedule: LiveSchedule | None = None
        if rollouts is not None:
            schedule = self.knobs["schedule"] = ScheduleKnob(rollouts, self._changed, tell)
            self._schedule = LiveSchedule(schedule.read, schedule.set)
        self.knobs["mixture"] = self._mixture
        self.knobs["optimizer"] = self.optimizer
        if scalable:
            self.knobs["replicas"] = self.replicas
        if reward is not None:
            self.knobs["reward"] = RewardKnob(reward, self._changed, tell)
        self._writing = asyncio.Lock()
        """Serialises clients' changes, in the order of their requests."""

    @property
    def schedule(self) -> LiveSchedule:
        """The schedule; its bounds can be set.

        Raises:
            ConfigError: the run has no rollouts.
        """
        if self._schedule is None:
            raise ConfigError("the run has no rollouts to schedule", hint="it trains on given examples")
        return self._schedule

    def read(self) -> dict[str, object]:
        """Return the current values of all knobs, as JSON."""
        return {name: knob.read() for name, knob in self.knobs.items()}

    async def write(self, name: str, values: dict[str, Any]) -> None:
        """Change a knob.

        Raises:
            ForgeError: the run lacks the knob, or it cannot have these values.
        """
        if not isinstance(name, str) or name not in self.knobs or not isinstance(values, dict):
            raise ConfigError(f"a live run has no {name!r} to set", hint=f"set one of {', '.join(self.knobs)}")
        async with self._writing:
            await self.knobs[name].write(values)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the flags' values and the changes since, as JSON."""
        return {name: {"given": knob.given, "changes": knob.changes()} for name, knob in self.knobs.items()}

    async def resume(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Reapply live changes of a resumed run, whose mixture has been restored already.

        Args:
            state: result of `state`, checked by `is_live_state`.

        Raises:
            ForgeError: a reward does not exist any more.
        """
        self._resuming = True
        with changes_by("as it was changed live"):
            for name, knob in self.knobs.items():
                if name in state:  # else the run had no such knob before
                    await knob.resume(state[name]["given"], state[name]["changes"])
        self._resuming = False

    def close(self) -> None:
        """Stop reporting changes."""
        self._mixture.close()

    def report(self, line: str) -> None:
        """Log a change that a resumed run does not keep, with its author."""
        author = _author.get()
        self._tell(f"{line} ({author})" if author else line)

    def _changed(self, line: str) -> None:
        self.report(line)
        if not self._resuming:
            self.changed.tell()


def _without_address(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def is_live_state(state: object) -> bool:
    """Return whether a value from a possibly corrupt file has the form that `LiveSettings.state` returns."""
    match state:
        case {
            "mixture": {"given": {"weights": dict(weights), "adapting": dict()}, "changes": dict()},
            **other_knobs,
        }:
            return _are_numbers(weights) and all(_is_knob_state(name, knob) for name, knob in other_knobs.items())
    return False


def _is_knob_state(name: object, state: object) -> bool:
    match name, state:
        case "schedule", {"given": dict(bounds), "changes": dict(changed)}:
            return bounds.keys() == {*_BOUNDS} >= changed.keys() and _are_numbers(bounds) and _are_numbers(changed)
        case "reward", {"given": {"reward": str()}, "changes": {"reward": {"name": str(), "texts": [*texts]}}}:
            return all(isinstance(text, str) for text in texts)
        case "reward", {"given": {"reward": str()}, "changes": dict(changes)}:
            return not changes
        case "replicas", {"given": dict(numbers), "changes": dict(changed)}:
            return all(type(number) is int for number in (*numbers.values(), *changed.values()))
        case "optimizer", {"given": {"lr": lr}, "changes": dict(changed)}:
            rates = {"lr": lr, **changed}
            return rates.keys() == {"lr"} and all(_is_rate(rate) for rate in (lr, *changed.values()))
    return False


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _are_numbers(values: Mapping[str, object]) -> bool:
    return all(type(number) in (int, float) for number in values.values())
