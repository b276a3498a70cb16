"""User-facing errors, each with the value seen and a hint; recipes print them as one clear message."""

from __future__ import annotations

import copyreg
import importlib.util
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from forge_rl.system.terminal import TRACE_LETTERS, shortened, visible


class ForgeError(Exception):
    """Base class of all user-facing errors.

        raise ConfigError(f"there are {n} replicas", hint="set --generator.replicas to 1 or more")

    Args:
        message: what went wrong, with the value seen.
        hint: what to do about it; printed on its own line.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = shortened(message)
        super().__init__(message, hint)
        self.message = message
        """The message; a long one, which quotes an exception of a user's code, has only its start and its end."""
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Keep class and fields across processes, whatever the constructor's arguments.
        return copyreg.__newobj__, (type(self), self.message, self.hint), self.__dict__  # type: ignore[attr-defined]

    def __str__(self) -> str:
        # Messages shown on terminals quote untrusted text from models, agents, files and other machines.
        return visible(f"{self.message}\n  hint: {self.hint}" if self.hint else self.message)


class ConfigError(ForgeError):
    """An invalid flag or combination of flags."""


def check_flags(
    config: object,
    flags: str,
    *,
    minimum: Mapping[str, float] | None = None,
    above: Mapping[str, float] | None = None,
    maximum: Mapping[str, float] | None = None,
    below: Mapping[str, float] | None = None,
) -> None:
    """Check fields of a config against limits: `check_flags(self, "--generator.", minimum={"replicas": 1})`.

    Raises:
        ConfigError: a field exceeds a limit; names the flag, which is `flags` plus the field's name with hyphens, or
            the argument of a class if `flags` is CLASS( or of a text if it ends in a colon.
    """
    for limits, within, words in (
        (minimum, operator.ge, "{} or more"),
        (above, operator.gt, "a value above {}"),
        (maximum, operator.le, "{} or less"),
        (below, operator.lt, "a value below {}"),
    ):
        for name, limit in (limits or {}).items():
            if not within(value := getattr(config, name), limit):
                is_argument = flags.endswith("(")
                flag = name if is_argument else flags + (name if flags.endswith(":") else name.replace("_", "-"))
                place = f"{flags}{name}=...): " * is_argument
                raise ConfigError(f"{place}{flag} is {value}", hint=f"set {flag} to {words.format(limit)}")


def check_installed(user: str, package: str, extra: str) -> None:
    """Check that an optional package is installed: `check_installed("--env mcp", "mcp", "mcp")`.

    Raises:
        ConfigError: it is not; names what uses it, and the extra to install.
    """
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user} needs {package}, which is not installed", hint=f"pip install 'forge_rl[{extra}]'")


class RunStopped(ForgeError):
    """The end of a run that `stop` was asked for: not a failure, and not shown as one."""


class InfrastructureError(ForgeError):
    """A failure of what ran the work, such as a sandbox, and not of the work: it is not the policy's fault."""


class ModelError(ForgeError):
    """A model that cannot be found, read, or built."""


class TaskError(ForgeError):
    """A task source that does not exist or yields no tasks."""


class UnscoredError(TaskError):
    """A reward that failed repeatedly: nothing can be scored until it is replaced."""


class ContextError(ForgeError):
    """A prompt that leaves no room for an answer in the context."""


class CheckpointError(ForgeError):
    """A checkpoint or run folder that cannot be written or read."""


class WeightsError(ForgeError):
    """A version of the weights that is missing, incomplete, stale or not what the trainer published."""


class AttestationError(WeightsError):
    """An engine's weights that differ from what the trainer published."""


class LossError(ForgeError):
    """A loss function that raised, or did not return a loss.

    Args:
        trace: the full traceback, for logs.
    """

    def __init__(self, message: str, *, hint: str = "", trace: str = "") -> None:
        super().__init__(message, hint=hint)
        self.trace = shortened(trace, TRACE_LETTERS)


class JudgeError(ForgeError):
    """A judge that returned no score even after retries: the episode's outcome is a judge error."""


class UngradedError(JudgeError):
    """A judge that works, but has no grade for this episode; it may have one for others."""


class SpendingError(JudgeError):
    """A spending limit was reached; ends the run."""


@dataclass(kw_only=True)
class Fault:
    """A failure of a replica or a service, and its outcome."""

    service: str
    replica: int | None
    """None if the whole service failed."""
    cause: str
    phase: str = ""
    """The controller's phase at the time; "" between phases."""
    at_s: float = 0.0
    """Time of the failure: on the monotonic clock, or since the run began in its summary."""
    fatal: bool = False
    """True if the run cannot continue."""
    recovered_s: float | None = None
    """Seconds until the replica served again; None until then."""

    @property
    def name(self) -> str:
        """Service and replica: `generator/1`."""
        return self.service if self.replica is None else f"{self.service}/{self.replica}"


class ServiceError(ForgeError):
    """A service that failed; names the service, replica, call and phase, and the cause.

    Args:
        replica: index of the replica, or None if the whole service failed.
        call: the remote call in flight, or "" if there was none.
        hint: what to do about it.
    """

    def __init__(
        self, message: str, *, service: str, replica: int | None = None, call: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.service = service
        self.replica = replica
        self.call = call
        self.phase = ""

    def __str__(self) -> str:
        location = self.service if self.replica is None else f"{self.service} replica {self.replica}"
        call, phase = self.call and f", call {self.call}", self.phase and f", phase {self.phase}"
        return f"{location}{call}{phase}: {super().__str__()}"


class ReplicaError(ServiceError):
    """A replica that died or hung; its calls can be retried on another one."""

    blamed: bool | None = None
    """Whether the replica died while running this very call; None if unknown."""


class ReplayError(ReplicaError):
    """An environment of a dead process that could not be rebuilt: its turns gave something else when repeated."""


class PoisonError(ServiceError):
    """Work that killed several replicas, one after another, and is not retried."""


class DeadlineError(ServiceError):
    """A phase or a remote call that did not end within its deadline."""


class HangError(DeadlineError):
    """User code that did not return within its deadline and was killed with its process."""
