"""Alerts: tells a command or a URL when an advisory begins or ends, and when the run ends. Never delays a step."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.categories import Category
from forge_rl.metrics.advisories import Advisory
from forge_rl.metrics.sinks import RunInfo, RunOutcome, Sink
from forge_rl.system.redaction import without_credentials
from forge_rl.system.supervised import supervised
from forge_rl.system.variables import handed_on, without_secrets

_MOST_WAITING = 100
_MOST_LETTERS = 2000
"""Most letters of an alert's text."""
_HOUR_S = 3600.0
_MOST_PER_HOUR = 60
"""Maximum alerts per hour about advisories; further ones are counted in the next alert's left_out. One a minute shows a
flapping condition without flooding a chat."""
_DEADLINE_S = 10.0
"""Timeout of one alert. A command that takes longer can start a process of its own and end; nothing else waits."""


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """Whom to tell when an advisory begins or ends, and when the run ends."""

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    command: str = ""
    """Command to run for each alert, without a shell, with a JSON object on stdin: event, text, run, folder, recipe,
    model, step, time, and for advisories kind and since. Events are advisory_began, advisory_ended, run_finished,
    run_stopped and run_failed."""
    webhook_url: str = ""
    """URL to POST the same JSON object to; never written to the run folder. Redirects are not followed."""

    def __post_init__(self) -> None:
        if self.webhook_url and not _is_url(self.webhook_url):
            raise ConfigError("--alerts.webhook-url is not a URL of http or https", hint="set it to https://HOST/PATH")
        if self.command:
            try:
                words = shlex.split(self.command)
            except ValueError as error:
                raise ConfigError(f"--alerts.command is not a command line: {error}", hint="check its quotes") from None
            if not words or shutil.which(words[0]) is None:
                raise ConfigError(
                    f"--alerts.command names {words[0] if words else ''!r}, which is not an executable file",
                    hint="give a program and its arguments, such as --alerts.command './notify.sh --quiet'",
                )


class AlertSink(Sink):
    """Sends alerts one after the other from a thread; one that fails becomes a warning, and the next is sent.

    Args:
        config: with a command, a URL or both.
        clock: monotonic seconds, for the bounded rate.
    """

    def __init__(self, config: Alerts, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._about: dict[str, object] = {}
        self._step = 0
        self._sent: deque[float] = deque(maxlen=_MOST_PER_HOUR)
        """Times of the latest alerts about advisories."""
        self._left_out = 0
        self._jobs: queue.Queue[dict[str, object] | None] = queue.Queue(maxsize=_MOST_WAITING)
        self._problem = ""
        """Why the last alert could not be sent."""
        self._thread: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        self._about = {
            "run": info.folder.name,
            "folder": str(info.folder.absolute()),
            "recipe": info.recipe,
            "model": info.model,
        }
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()
        super().start(info)

    def rollback(self, step: int) -> None:
        self._step = step

    def log(self, step: int, *_: object) -> None:
        self._step = max(self._step, step)
        self._raise_problem()

    def advisory(self, advisory: Advisory, *, ended: bool) -> None:
        sent_at = self._clock()
        # The deque holds as many times as an hour may have, so its oldest decides.
        if len(self._sent) == self._sent.maxlen and sent_at - self._sent[0] < _HOUR_S:
            self._left_out += 1
            return
        self._sent.append(sent_at)
        event = "advisory_ended" if ended else "advisory_began"
        self._put(event, advisory.text, {"kind": advisory.kind, "since": advisory.since})

    def end(self, outcome: RunOutcome, cause: str) -> None:
        self._put(f"run_{outcome}", cause or f"the run {outcome if outcome != 'stopped' else 'was stopped'}")

    def close(self) -> None:
        """Send the waiting alerts, for at most twice the deadline of one."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=_DEADLINE_S)
        thread.join(2 * _DEADLINE_S)
        self._raise_problem()

    def _put(self, event: str, text: str, more: dict[str, object] | None = None) -> None:
        # The text leaves the machine, so secrets that it quotes are removed.
        public_text = without_secrets(without_credentials(text))[:_MOST_LETTERS]
        alert = {"event": event, "text": public_text, **self._about, "step": self._step, "time": round(time.time(), 3)}
        try:
            # A full queue costs this alert, not the time of a step.
            self._jobs.put_nowait(alert | (more or {}) | ({"left_out": self._left_out} if self._left_out else {}))
            self._left_out = 0
        except queue.Full:
            self._left_out += 1

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, ""
        if problem:
            raise ForgeError(problem)

    def _work(self) -> None:
        while (alert := self._jobs.get()) is not None:
            payload = json.dumps(alert)
            # Each on its own: if one fails, the other still gets the alert.
            for name, send in (("command", self._run), ("webhook-url", self._post)):
                try:
                    if getattr(self._config, name.replace("-", "_")):
                        send(payload)
                except Exception as error:
                    self._problem = f"the alert {alert['event']} was not sent by --alerts.{name}: {_cause(error)}"

    def _run(self, payload: str) -> None:
        """Run the command.

        Raises:
            ForgeError: it failed.
            TimeoutExpired: it took longer than the deadline.
        """
        command = subprocess.Popen(
            supervised(shlex.split(self._config.command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=handed_on(),
            start_new_session=True,
            text=True,
        )
        try:
            _, errors = command.communicate(payload, timeout=_DEADLINE_S)
        except BaseException:
            command.send_signal(signal.SIGTERM)  # the supervisor kills all that the command has started
            command.communicate()
            raise
        if command.returncode:
            raise ForgeError(f"exit status {command.returncode}: {errors.strip()[-200:]}")

    def _post(self, payload: str) -> None:
        """POST to the URL; the response is not read.

        Raises:
            ForgeError: the status is an error.
            HTTPError: nothing answers.
        """
        import httpx

        headers = {"content-type": "application/json"}
        url = self._config.webhook_url
        with httpx.stream("POST", url, content=payload, headers=headers, timeout=_DEADLINE_S) as response:
            if response.status_code >= 300:
                raise ForgeError(f"status {response.status_code}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _cause(error: Exception) -> str:
    """Describe an error without a URL, which may hold a secret."""
    if isinstance(error, ForgeError):
        return error.message
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s"
    return type(error).__name__
