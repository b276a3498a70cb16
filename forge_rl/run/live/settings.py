"""The live settings of a run: code or attached clients change them while it runs, and a resumed run keeps them.

Numbers are knobs, see `run.live.knobs`; the mixture and the reward have classes of their own with the same methods.
`given` holds the values by this command's flags. `read` returns the current values, and `write` sets a client's,
changing nothing if it raises a ForgeError. `changes` returns the live changes to save, and `resume` reapplies the
changes of an earlier process. All values are JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, Protocol

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.user_code import name_of, shown
from forge_rl.rewards.composition import described
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.live.knobs import Knob, LiveSchedule
from forge_rl.services.reward import RewardFunction, RewardService
from forge_rl.services.trainer import Trainer
from forge_rl.system.listeners import Listeners

# The repr of a function or object ends in its address, which differs from process to process.
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


class MixtureKnob:
    """Weights of the sources, and how they adapt. The mixture's own state, restored before `resume`, holds both."""

    def __init__(self, mixture: Mixture, adapting: Adapting, changed: Callable[[str], None]) -> None:
        self._mixture = mixture
        self._adapting = adapting
        self._changed = changed
        # Only after a live change does a resumed run keep the mixture's weights.
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
        # JSON of a client: types are checked here, before the mixture sees any of it.
        match values:
            case {"weights": dict(weights)} if len(values) == 1:
                for source, weight in weights.items():
                    if isinstance(weight, bool) or not isinstance(weight, int | float):
                        raise ConfigError(f"the weight of {source!r} is {weight!r}", hint="choose a number from 0 up")
                self._mixture.update(weights)
            case {"adapting": dict(settings)} if len(values) == 1:
                if settings.get("adapt", "off") not in ("off", "success"):
                    raise ConfigError(f"the mixture cannot adapt by {settings['adapt']!r}", hint="set off or success")
                try:
                    config = Adapting(**settings)
                except TypeError as error:
                    raise ConfigError(f"the mixture cannot adapt by {settings}: {error}") from error
                self._mixture.adapt(config)
            case _:
                raise ConfigError(f"the mixture is set to {sorted(values)}", hint="set weights, or adapting")

    def changes(self) -> dict[str, Any]:
        state = self._mixture.state() if self._touched else {}
        return {name: state[name] for name in ("weights", "adaptive") if name in state}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        mixture = self._mixture
        readapted = self._apply_flags(old_flags)
        if not readapted and mixture.adapting != self._adapting:
            self._changed(f"mixture adapts: {mixture.adapting.adapt}")
        # Shares that adapt move by themselves, which is no live change.
        for name, weight in self.given["weights"].items() if mixture.adapting.adapt == "off" else ():
            if mixture[name] != weight:
                self._changed(f"mixture {name} {weight:g} -> {mixture[name]:g}")
        self._touched = bool(changes)

    def roll_back(self, old_flags: Mapping[str, Any]) -> None:
        """Apply this command's flags to a mixture restored from a checkpoint, unless it was changed live since.

        Args:
            old_flags: `given` of the process that wrote the checkpoint, perhaps an earlier command's.
        """
        if not self._touched:
            self._apply_flags(old_flags)
            self._touched = False

    def _apply_flags(self, old_flags: Mapping[str, Any]) -> bool:
        """Apply flags that changed since the restored mixture's process; returns whether shares start to adapt with
        other settings."""
        # The restored mixture has the earlier weights. Flags that changed since then override them, as with other
        # knobs.
        mixture, weights = self._mixture, self.given["weights"]
        reweighted = old_flags["weights"] != weights
        with changes_by("by the current flags"):
            if reweighted:
                mixture.adapt(Adapting())
                # Largest first: the mixture refuses weights that are all 0, even between two assignments.
                for name, weight in sorted(weights.items(), key=lambda item: -item[1]):
                    mixture[name] = weight
            readapted = old_flags["adapting"] != self.given["adapting"] or (
                reweighted and self._adapting.adapt != "off"
            )
            if readapted:
                mixture.adapt(self._adapting)
        return readapted

    def close(self) -> None:
        """Stop reporting changes; the mixture may be reused."""
        self._mixture.changed.discard(self._mixture_changed)

    def _mixture_changed(self, line: str) -> None:
        self._touched = True
        self._changed(line)


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
            try:
                await self._replace(texts)
            except ForgeError as error:
                raise ConfigError(
                    f"the reward was replaced live by {name}, which cannot be built again: {error.message}",
                    hint="put it back, or resume with --out and another --reward, which overrides the live change",
                ) from error

    async def _replace(self, texts: Sequence[str]) -> None:
        # In a thread, as the user's file may import for a long time.
        function = await asyncio.to_thread(build_reward, texts)
        # Noted before the change, whose listener reads the texts of the new reward; undone if it is refused.
        previous, self._built = self._built, (function, list(texts))
        try:
            await self._reward.replace(function)
        except BaseException:
            self._built = previous
            raise

    def _texts(self) -> list[str]:
        """Return the strings that build the current reward again; [] if there are none."""
        function, (built_function, texts) = self._reward.function, self._built
        # Code may have replaced the reward since it was last built from texts.
        if built_function is function and texts:
            return texts
        text = name_of(function)
        return [text] if text else []

    def _replaced(self) -> None:
        # Called after the change, when the earlier reward's description can no longer be read.
        old_reward, self._now = self._now, self.read()
        self._changed(f"reward {old_reward} -> {self._now}")


class Scalable(Protocol):
    """A service whose number of replicas can change in a live run."""

    @property
    def replicas(self) -> int: ...

    def scale(self, replicas: int) -> None: ...


def schedule_knob(rollouts: RolloutExecutor, changed: Callable[[str], None], tell: Callable[[str], None]) -> Knob:
    """Return the knob of a schedule's bounds. A lower bound replaces episodes in flight that are too old for it."""

    def set_bounds(values: Mapping[str, Any]) -> None:
        if "max_lag" in values and rollouts.config.kind in ("synchronous", "one_step"):
            raise ConfigError(
                f"the schedule {rollouts.config.kind} has a fixed lag, which no bound changes",
                hint="start the run with --schedule.kind pipelined or asynchronous",
            )
        rollouts.config = replace(rollouts.config, **values)

    return Knob(
        name="schedule",
        get=lambda: vars(rollouts.config),
        set=set_bounds,
        changed=changed,
        tell=tell,
        from_when=", from the next batch on",
    )


def optimizer_knob(trainer: Trainer, changed: Callable[[str], None], tell: Callable[[str], None]) -> Knob:
    """Return the knob of the policy's peak learning rate, which the schedule of --trainer.optimizer.decay scales."""

    def set_lr(values: Mapping[str, Any]) -> None:
        if "lr" in values:
            trainer.lr = float(values["lr"])

    return Knob(
        name="optimizer",
        get=lambda: {"lr": trainer.lr},
        set=set_lr,
        changed=changed,
        tell=tell,
        from_when=", from the next step on",
    )


def replicas_knob(
    services: Mapping[str, Scalable], changed: Callable[[str], None], tell: Callable[[str], None]
) -> Knob:
    """Return the knob for the numbers of engines and environment processes on the current hosts. Hosts that join or
    leave change these numbers in proportion."""

    def counts() -> dict[str, int]:
        return {name: service.replicas for name, service in services.items()}

    def scale(values: Mapping[str, Any]) -> None:
        # All or none: what was scaled before a refusal is scaled back.
        old_counts = counts()
        with contextlib.ExitStack() as undo:
            for name, count in values.items():
                services[name].scale(count)
                undo.callback(services[name].scale, old_counts[name])
            undo.pop_all()

    return Knob(name="replicas", get=counts, set=scale, changed=changed, tell=tell, moves=True)


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
        self.optimizer = optimizer_knob(trainer, self._changed, tell)
        self.replicas = replicas_knob(scalable or {}, self._changed, tell)
        self.knobs: dict[str, Knob | MixtureKnob | RewardKnob] = {}
        self._schedule: LiveSchedule | None = None
        if rollouts is not None:
            schedule = self.knobs["schedule"] = schedule_knob(rollouts, self._changed, tell)
            self._schedule = LiveSchedule(schedule.read, schedule.put)
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
        # Changes are reported as they are reapplied, but written back only once, by the caller.
        self._resuming = True
        with changes_by("as it was changed live"):
            for name, knob in self.knobs.items():
                if name in state:  # else the run had no such knob before
                    await knob.resume(state[name]["given"], state[name]["changes"])
        self._resuming = False

    def roll_back(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply this command's flags to the mixture, which was restored from a checkpoint; other knobs kept theirs.

        Args:
            state: result of `state` in the checkpoint.
        """
        self._resuming = True
        self._mixture.roll_back(state["mixture"]["given"])
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
