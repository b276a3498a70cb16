"""Attaches to a live run in another process, to inspect and change it. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, MutableMapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.runtime.local_socket import connect
from forge_rl.runtime.sealed import NONCE_BYTES, SealedChannel, nonce
from forge_rl.system.folders import check_own
from forge_rl.system.terminal import visible

if TYPE_CHECKING:  # loads NumPy, which only batches need
    from forge_rl.types import Batch

SOCKET = "control.sock"
"""Name of the socket in a run folder."""
ELSEWHERE = "attach.json"
"""File in a run folder with the address and the key for clients on other machines, if the run serves them."""
_FILE = re.compile(r"([^=]*=)?([^=]+\.py)(:.*)")
_CONNECT_S = 20.0
_BUSY_S = 30.0
"""Time to keep retrying while other clients keep the run busy."""
_TAIL_BYTES = 1 << 18


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
    run = AttachedRun(Path(folder))
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
        from forge_rl.metrics.episode_files import EpisodeFile

        name = self.ask("last_batch")
        if name is None:
            return None
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
        return Events(_events(self.folder, last))

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
        """Change a knob: "mixture", "schedule", "reward", "optimizer" or "replicas"."""
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
        deadline = time.monotonic() + _BUSY_S
        while (reply := self._exchange({"do": do, "with": arguments})).get("busy") and time.monotonic() < deadline:
            time.sleep(0.1)
        if "error" in reply:
            raise ForgeError(str(reply["error"]), hint=str(reply.get("hint", "")))
        return reply.get("result")

    def _exchange(self, request: dict[str, object]) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        try:
            connection = connect(self.folder, SOCKET, timeout_s=_CONNECT_S)
        except PermissionError as error:
            raise ConfigError(f"the run in {self.folder} is another user's: {error}") from None
        except OSError:
            connection = None
        try:
            answer = _asked_elsewhere(self.folder, line) if connection is None else _asked(connection, line)
            if not answer:
                raise OSError("the run ended, or refused this user")
            reply = json.loads(answer)
            if not isinstance(reply, dict):
                raise ValueError("its reply is not an object")
        except FileNotFoundError:
            raise ConfigError(_ended(self.folder), hint="run the same command again to resume it") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"the run in {self.folder} did not answer {request['do']!r}: {error}") from None
        return reply

    def __repr__(self) -> str:
        try:
            status = self.ask("status")
        except ForgeError as error:
            return f"Attached  {error.message}"
        paused = ", paused: resume() continues" if status["paused"] else ""
        rows = {"phase": (status["phase"] or "between phases") + paused}
        rows["lr"] = f"{status['optimizer']['lr']:g}"
        if (schedule := status.get("schedule")) is not None:
            mean = status["reward_mean"]
            bounds = ", ".join(f"{name} {schedule[name]:g}" for name in ("max_lag", "over_sampling", "max_episodes"))
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

    def __delitem__(self, source: str) -> None:
        raise ConfigError(f"the source {source!r} cannot be taken out of a live run", hint="set its weight to 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights())

    def __len__(self) -> int:
        return len(self._weights())

    # One question each, as the weights of an adapting mixture may change between two.
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


class LiveSchedule:
    """The schedule of a live run: settings are readable, and bounds can be set.

        run.schedule.max_lag = 2  # from the next batch on

    A lower bound applies from the next batch on: episodes in flight that are too old for it are replaced.

    Args:
        read: returns the settings by name.
        write: sets bounds by name; raises a ForgeError for a setting that cannot change or a value out of range.
    """

    max_lag: int
    over_sampling: float
    max_episodes: int

    def __init__(self, read: Callable[[], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]) -> None:
        vars(self).update(_read=read, _write=write)

    def __getattr__(self, name: str) -> Any:
        settings = vars(self)["_read"]() if not name.startswith("_") else {}
        if name not in settings:
            raise AttributeError(f"the schedule has no {name!r}")
        return settings[name]

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["_write"]({name: value})

    def __repr__(self) -> str:
        settings = vars(self)["_read"]()
        return visible(
            "\n".join([f"Schedule  {settings['kind']}", *(f"  {name} {value}" for name, value in settings.items())])
        )


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


def _asked(connection: socket.socket, line: bytes) -> bytes:
    """Send a request over a run's socket; returns its reply, empty if there is none."""
    with connection, connection.makefile("rb") as replies:
        with contextlib.suppress(BrokenPipeError):  # it replied early: busy, or the request is too long
            connection.sendall(line)
        connection.settimeout(None)  # a reply may take as long as a step
        return _whole(replies.readline())


def _asked_elsewhere(folder: Path, line: bytes) -> bytes:
    """Send a request to a run on another machine; returns its reply, empty if there is none.

    Raises:
        FileNotFoundError: the run does not serve clients on other machines, or has ended.
        OSError: it cannot be reached, or is not the run that wrote the folder's file.
    """
    path = folder / ELSEWHERE
    place = json.loads(path.read_text())
    try:
        connection = socket.create_connection((str(place["host"]), int(place["port"])), timeout=_CONNECT_S)
    except ConnectionRefusedError:
        raise FileNotFoundError(path) from None
    with connection, connection.makefile("rb") as replies:
        client_nonce = nonce()
        run_nonce = replies.readline(NONCE_BYTES + 1).strip()
        sealed = SealedChannel(str(place["key"]).encode(), run_nonce, client_nonce)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(client_nonce + sealed.seal("request", line))
        connection.settimeout(None)
        reply = _whole(replies.readline())
        return sealed.open("reply", reply) if reply else b""


def _whole(reply: bytes) -> bytes:
    """Return a reply, which may be empty.

    Raises:
        ConnectionError: the connection was closed in the middle of it.
    """
    if reply and not reply.endswith(b"\n"):
        raise ConnectionError(f"the connection was closed after {len(reply)} bytes of its reply")
    return reply


def _absolute(text: str) -> str:
    """Make the path of a reward's file absolute, so that the run's process finds it."""
    match = _FILE.fullmatch(text)
    if match is None:
        return text
    prefix, file, options = match.groups()
    return f"{prefix or ''}{Path(file).expanduser().resolve()}{options}"


def _ended(folder: Path) -> str:
    """Return the message that a folder has no live run, and how the last one ended."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        if summary.get("outcome", "finished") != "finished":
            raise ValueError("it did not reach its end")
        scores = summary["score_before"], summary["score_after"]
        score = "" if None in scores else f", with a held-out score of {scores[1]:.3f} after {scores[0]:.3f}"
        return f"the run in {folder} is not running: it finished after {summary['steps']} steps{score}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    event = next(iter(_events(folder, 1)), None)
    detail = f"; its last event: {event['text']}" if event else ""
    return f"the run in {folder} is not running: it was stopped, or has not started yet{detail}"


def _events(folder: Path, last: int) -> list[dict[str, Any]]:
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # truncated at its start, or half-written
            event = json.loads(line)
            if isinstance(event, dict) and {"time", "level", "text"} <= event.keys():
                events.append(event)
    return events[-last:] if last > 0 else []
