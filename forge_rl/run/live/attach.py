"""Attaches to a live run in another process, to inspect and change it. Imports nothing heavy."""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.run.live.control_client import exchange, last_events
from forge_rl.run.live.knobs import BOUNDS, LiveSchedule
from forge_rl.system.folders import check_own
from forge_rl.system.terminal import visible

if TYPE_CHECKING:  # loads NumPy, which only batches need
    from forge_rl.types import Batch

# [NAME=]FILE.py:REST, a reward in a file as --reward takes it.
_FILE = re.compile(r"([^=]*=)?([^=]+\.py)(:.*)")
_BUSY_S = 30.0
"""Time to keep retrying while other clients keep the run busy."""


def attach(folder: str | Path) -> AttachedRun:
    """Attach to a live run by its folder.

        run = forge_rl.attach("runs/grpo-1a2b3c4d")
        run.mixture["maths"] = 0.7
        run.schedule.max_lag = 2
        run.reward = "mine.py:score"

    Raises:
        ConfigError: the folder is not a run folder, belongs to another user, or has no live run; says how the last one
            ended.
    """
    run = AttachedRun(Path(folder).expanduser())
    # Fails here, and not at the first access, if there is no live run.
    run.ask("status")
    return run


class AttachedRun:
    """A run in another process. Each access queries it, so values are always current."""

    __slots__ = ("folder",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} is not a run folder", hint="give the folder that the run names in its first line"
            )
        self.folder = folder.resolve()
        # The folder says which socket, address and key to trust: nobody else may have written them.
        check_own(self.folder, ConfigError, deep=False)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return int(self.ask("status")["step"])

    @property
    def mixture(self) -> AttachedMixture:
        """Weights of the sources; read and write."""
        return AttachedMixture(self)

    @property
    def schedule(self) -> LiveSchedule:
        """Settings of the schedule; its bounds can be set."""
        return LiveSchedule(lambda: self._knob("schedule"), lambda bounds: self.set("schedule", bounds))

    @property
    def lr(self) -> float:
        """The peak learning rate. Set it, and it applies from the next step on."""
        return float(self._knob("optimizer")["lr"])

    @lr.setter
    def lr(self, lr: float) -> None:
        self.set("optimizer", {"lr": lr})

    @property
    def paused(self) -> bool:
        """Whether the run is paused, or will be at its next boundary."""
        return bool(self.ask("status")["paused"])

    @property
    def reward(self) -> str:
        """The current reward. Set it to a string as in `--reward`, or to several."""
        return str(self._knob("reward"))

    @reward.setter
    def reward(self, texts: str | Sequence[str]) -> None:
        self.replace_reward(*([texts] if isinstance(texts, str) else texts))

    def replace_reward(self, *texts: str) -> None:
        """Score with another reward from now on; file paths are relative to this process's working directory."""
        self.set("reward", {"texts": [_absolute(text) for text in texts]})

    @property
    def last_batch(self) -> Batch | None:
        """The last step's batch, without routed experts; None before the first step."""
        from forge_rl.metrics.episode_reader import EpisodeFile

        name = self.ask("last_batch")
        if name is None:
            return None
        # Only the name: a reply must not lead out of the folder, as the file is deleted below.
        path = self.folder / Path(str(name)).name
        try:
            return EpisodeFile(path).batch()
        finally:
            path.unlink(missing_ok=True)

    def chat(self, message: str, *, max_tokens: int | None = None, temperature: float = 0.0) -> str:
        """Chat with the current policy; greedy by default."""
        return str(self.ask("chat", message=message, max_tokens=max_tokens, temperature=temperature))

    def open_gateway(self) -> dict[str, Any]:
        """Let the run serve its current policy over OpenAI's API, on this machine, until the run ends.

        Returns:
            "url", "key" and "model" for clients, the model's "folder", and "max_model_len".
        """
        gateway: dict[str, Any] = self.ask("open_gateway")
        return gateway

    def events(self, last: int = 20) -> Events:
        """Read the last events in this folder; also works after the run has ended."""
        return Events(last_events(self.folder, last))

    def checkpoint(self) -> Path:
        """Write a checkpoint after the current step; waits for it."""
        return Path(self.ask("checkpoint"))

    def evaluate(self) -> Any:
        """Evaluate after the current step; waits for it and returns the result of `Run.evaluate`."""
        return self.ask("evaluate")

    def explain_gap(self, prompts: int = 16) -> Text:
        """Explain the gap between engines and trainer after the current step; waits for it. See `Run.explain_gap`."""
        return Text(self.ask("explain_gap", prompts=prompts))

    def scale(self, *, engines: int | None = None, environments: int | None = None) -> None:
        """Start or stop engines, or processes of environments; stopped ones hand their work over."""
        counts = {"engines": engines, "environments": environments}
        self.set("replicas", {name: count for name, count in counts.items() if count is not None})

    @property
    def hosts(self) -> dict[str, str]:
        """State of each host: "was asked for", "serves", "leaves", or why it is gone."""
        return dict(self.ask("hosts")["hosts"])

    def leave(self, host: str) -> None:
        """Let a host go; returns once nothing of the run is left there."""
        self.ask("leave", name=host)

    def pause(self) -> None:
        """Pause: engines hold their requests at a token boundary, and training stops after the current step."""
        self.ask("pause")

    def resume(self) -> None:
        """Continue a paused run."""
        self.ask("resume")

    def stop(self, *, now: bool = False) -> None:
        """End the run after the current step, with a checkpoint and its summary; the same command resumes it.

        Args:
            now: interrupt the step, as SIGTERM does; the steps before it are saved.
        """
        self.ask("stop", now=now)

    def set(self, knob: str, values: Mapping[str, object]) -> None:
        """Change several values of a knob at once, or none if one is refused: "mixture", "reward", or a name in
        `knobs.BOUNDS`."""
        self.ask("set", knob=knob, values=values)

    def _knob(self, name: str) -> Any:
        """Return the current value of a knob that only a run with rollouts has."""
        status = self.ask("status")
        if name not in status:
            raise ConfigError(f"the run has no {name}: it trains on given examples")
        return status[name]

    def ask(self, do: str, **arguments: object) -> Any:
        """Send a request and wait for its reply.

        Raises:
            ForgeError: the run refused it, or has ended.
        """
        request, deadline = {"do": do, "with": arguments}, time.monotonic() + _BUSY_S
        # A run that is busy has not begun the request, so sending it again changes nothing twice.
        while (reply := exchange(self.folder, request)).get("busy") and time.monotonic() < deadline:
            time.sleep(0.1)
        if "error" in reply:
            raise ForgeError(str(reply["error"]), hint=str(reply.get("hint", "")))
        return reply.get("result")

    def __repr__(self) -> str:
        # The run may have ended, and a repr that raises is of no use at a prompt.
        try:
            status = self.ask("status")
        except ForgeError as error:
            return f"Attached  {error.message}"
        paused = ", paused: resume() continues" if status["paused"] else ""
        rows = {"phase": (status["phase"] or "between phases") + paused}
        rows["lr"] = f"{status['optimizer']['lr']:g}"
        if (schedule := status.get("schedule")) is not None:
            mean = status["reward_mean"]
            bounds = ", ".join(f"{name} {schedule[name]:g}" for name in BOUNDS["schedule"])
            rows |= {
                "version": status["version"],
                "engines": status["engines"],
                "rollouts": status["rollouts"],
                "schedule": f"{schedule['kind']}, {bounds}",
                "reward": status["reward"] + ("" if mean is None else f", {mean:.3f} on average in the last batch"),
            }
        table = (f"  {name:<8}  {value}" for name, value in rows.items())
        mixture = (f"  {line}" for line in status["mixture"]["shown"].splitlines())
        title = f"Run  step {status['step']} of {status['steps']}  {status['folder']}"
        return visible("\n".join([title, *table, *mixture]))


class AttachedMixture(MutableMapping[str, float]):
    """The mixture of a run in another process: `run.mixture["maths"] = 0.7`, from the next batch on."""

    __slots__ = ("_run",)

    def __init__(self, run: AttachedRun) -> None:
        self._run = run

    def __getitem__(self, source: str) -> float:
        return float(self._weights()[source])

    def __setitem__(self, source: str, weight: float) -> None:
        self._run.set("mixture", {"weights": {source: weight}})

    def update(self, weights: Mapping[str, float]) -> None:  # type: ignore[override]
        """Set several weights at once, or none if one is refused."""
        self._run.set("mixture", {"weights": dict(weights)})

    def __delitem__(self, source: str) -> None:
        raise ConfigError(f"the source {source!r} cannot be taken out of a live run", hint="set its weight to 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights())

    def __len__(self) -> int:
        return len(self._weights())

    # One request each: the mixin's versions ask once per source, and an adapting mixture may change between requests.
    def keys(self) -> KeysView[str]:
        return self._weights().keys()

    def values(self) -> ValuesView[float]:
        return self._weights().values()

    def items(self) -> ItemsView[str, float]:
        return self._weights().items()

    def adapt(self, adapt: str = "success", **settings: float) -> None:
        """Let the weights follow the success rate of each source, or with "off" stay fixed.

        Args:
            settings: least, most, target and momentum, as in the flags `--mixture.*`.
        """
        self._run.set("mixture", {"adapting": {"adapt": adapt, **settings}})

    def _weights(self) -> dict[str, float]:
        weights: dict[str, float] = self._run.ask("status")["mixture"]["weights"]
        return weights

    def __repr__(self) -> str:
        return visible(str(self._run.ask("status")["mixture"]["shown"]))


class Events(list[dict[str, Any]]):
    """Events of a run: time in seconds, level and text. Prints one line per event."""

    def __repr__(self) -> str:
        times = (time.strftime("%H:%M:%S", time.localtime(event["time"])) for event in self)
        # Indent further lines, so that a text of several lines does not look like several events.
        lines = (str(event["text"]).replace("\n", "\n" + " " * 19) for event in self)
        levels = (f"{event['level']:<7}" for event in self)
        return visible("\n".join(map("  ".join, zip(times, levels, lines, strict=True))))


class Text(str):
    """A text whose lines are shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return visible(str(self))


def _absolute(text: str) -> str:
    """Make the path of a reward's file absolute, so that the run's process finds it."""
    match = _FILE.fullmatch(text)
    if match is None:
        return text
    prefix, file, options = match.groups()
    return f"{prefix or ''}{Path(file).expanduser().resolve()}{options}"
