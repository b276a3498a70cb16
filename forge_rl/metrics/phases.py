"""The clock of the phases: seconds and tokens of each phase of a step, and how busy each device was."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge_rl.errors import ForgeError, ServiceError
from forge_rl.system.listeners import Listeners


class PhaseClock:
    """Measures the phases of a step. The controller is in one phase at a time, so phases do not nest.

    A step lasts from construction, or from the last `finish_step`, to the next `finish_step`.

    Example:
        with clock.phase("rollout"):
            ...
        clock.finish_step()  # {"seconds/rollout": 2.1, "seconds/step": 2.2}

    Args:
        clock: monotonic seconds.
        paused_s: seconds so far in which the run was paused on request, which no phase and no step counts.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, paused_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._clock = clock
        self._paused_s = paused_s
        # One attribute for both, so that the live display's thread never pairs a name with another phase's time.
        self._current: tuple[str, float] = ("", clock())
        self.used = False
        """True once a phase has begun."""
        self.ended = Listeners[[str, float, float]]()
        """Called after each phase, even a failed one, with its name and its start and end in clock seconds."""
        self._begun = clock()
        self._paused_before = paused_s()
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, int] = defaultdict(int)
        self._busy: dict[tuple[str, str], float] = defaultdict(float)  # by device, and the phase or ""

    @property
    def current(self) -> str:
        """Name of the current phase, or "" between phases."""
        return self._current[0]

    @property
    def since(self) -> float:
        """Clock time at which the current phase began or, between phases, the last one ended."""
        return self._current[1]

    def now(self) -> tuple[str, float, float]:
        """Return the current phase or "", seconds in it (or since the last one), and seconds since the step began."""
        # Read once, as another thread may ask while the phase changes.
        (name, since), moment = self._current, self._clock()
        return name, moment - since, moment - self._begun

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of this step that has ended."""
        return dict(self._seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase; several blocks of one name in a step add up.

        Sets `phase` on a ServiceError that passes through.

        Raises:
            ForgeError: another phase has not ended.
        """
        if self.current:
            raise ForgeError(
                f"phase {name!r} was entered inside phase {self.current!r}",
                hint=f"end the block of `phase({self.current!r})` first: a controller is in one phase at a time",
            )
        assert name not in ("", "step"), f"no name for a phase: {name!r}"
        begin, paused_before = self._clock(), self._paused_s()
        self.used = True
        self._current = (name, begin)
        try:
            yield
        except BaseException as error:
            _name_phase(error, name)
            raise
        finally:
            end = self._clock()
            self._seconds[name] += end - begin - (self._paused_s() - paused_before)
            # Before the listeners, which see the clock between two phases.
            self._current = ("", end)
            self.ended.tell(name, begin, end)

    def tokens(self, phase: str, count: int) -> None:
        """Add tokens processed in a phase of this step."""
        self._tokens[phase] += count

    def busy(self, device: str, seconds: float, *, phase: str = "") -> None:
        """Add seconds of compute on a device, such as "trainer" or "generator/0", in this step.

        With a phase, they count towards the device's share of that phase instead of the step.
        """
        self._busy[device, phase] += seconds

    def finish_step(self) -> dict[str, float]:
        """End the step and begin the next.

        Returns:
            `seconds/<phase>`, `tokens/<phase>`, `tokens_per_s/<phase>`, `busy/<device>` (share of the step's wall
            time), `busy_<phase>/<device>` (share of the phase's) and `seconds/step`, which is at least the sum of the
            phases.

        Raises:
            ForgeError: a phase has not ended.
        """
        if self.current:
            raise ForgeError(
                f"the step was ended inside phase {self.current!r}",
                hint=f"end the step after the block of `phase({self.current!r})`",
            )
        end = self._clock()
        paused_s = self._paused_s()
        wall = end - self._begun - (paused_s - self._paused_before)
        values = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        for name, count in self._tokens.items():
            values[f"tokens/{name}"] = float(count)
            # A phase that took no time has no rate.
            if self._seconds.get(name, 0.0) > 0.0:
                values[f"tokens_per_s/{name}"] = count / self._seconds[name]
        for (device, phase), seconds in self._busy.items():
            phase_s = self._seconds.get(phase, 0.0) if phase else wall
            if phase_s > 0.0:
                values[f"busy_{phase}/{device}" if phase else f"busy/{device}"] = seconds / phase_s
        values["seconds/step"] = wall
        self._begun, self._paused_before = end, paused_s
        self._seconds.clear()
        self._tokens.clear()
        self._busy.clear()
        return values


def _name_phase(error: BaseException, phase: str) -> None:
    if isinstance(error, ServiceError):
        # An error that has a phase keeps it: it comes from that phase, even if another one re-raises it.
        error.phase = error.phase or phase
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _name_phase(inner, phase)
