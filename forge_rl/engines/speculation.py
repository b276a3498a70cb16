"""Reads --generator.speculation, and switches drafts off where they are not worth their cost."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from forge_rl.engines.devices import device_type
from forge_rl.errors import ConfigError, ModelError
from forge_rl.flags.options import build
from forge_rl.flags.texts import parse, suggest
from forge_rl.models.cache import Progress
from forge_rl.models.dequantized import dequantized
from forge_rl.models.resolve import resolve_model
from forge_rl.tokens.same_tokens import check_same_tokens

OFF = "off"
_KINDS = ("ngram", "suffix", "draft")
_DECAY = 0.99
_ENOUGH = 32
"""Minimum number of drafted tokens for their accepted share to count."""
_RETRY = 32
"""Number of steps after which one step drafts although drafts are off, or the reverse, so that both stay measured."""
_MEASURED = 5
"""Minimum number of measured steps of each kind before their speeds are compared."""
_FIRST_RETRY = 8
"""The same, while too few steps of the other kind are measured."""
_WINDOW = 32
"""Maximum number of recent steps of each kind that a speed is computed from."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    max_tokens: int = 8
    """Maximum tokens of a draft."""
    max_running: int = 8
    """Maximum running requests for which tokens are drafted; with more, a step is bound by compute."""
    min_accepted: float = 0.3
    """Share of drafted tokens that must be accepted; below it, drafts are made only now and then, to measure again."""
    adaptive: bool = True
    """Stop drafting where steps with drafts are measured to yield fewer tokens per second than steps without."""


@dataclass(frozen=True, kw_only=True)
class Speculation(_Options):
    """Settings of speculative decoding."""

    kind: Literal["ngram", "suffix", "draft"]
    """Where drafts come from: ngram, the request's own text; suffix, also other answers to the same prompt; draft, a
    frozen smaller model."""
    model: str = ""
    """The draft model, as `resolve_model` takes it; "" for the other kinds."""


def read_speculation(text: str) -> Speculation | None:
    """Return the settings that a text names, or None for "off".

        read_speculation("suffix:max_tokens=16,max_running=4")

    Raises:
        ConfigError: the kind or an option is unknown, or an option has an invalid value.
    """
    bundled = (OFF, *_KINDS)
    parsed = parse(text, "--generator.speculation", bundled=bundled, takes_argument=True, takes_weight=False)
    if parsed.name not in bundled:
        raise parsed.wrong(f"unknown kind {parsed.name!r}", suggest(parsed.name, bundled, "kinds"))
    model = parsed.argument.strip("\"'")
    if parsed.name == "draft" and not model:
        raise parsed.wrong("draft names no model", "write draft:MODEL, a smaller model with the policy's tokenizer")
    if (model and parsed.name != "draft") or (parsed.name == OFF and parsed.raw_params):
        raise parsed.wrong(f"{parsed.name} does not take this", "write off, or KIND:max_tokens=8")
    if parsed.name == OFF:
        return None
    options: _Options = build(parsed, _Options)
    bounds = {"max_tokens": (1, 64), "max_running": (1, 1 << 16), "min_accepted": (0, 1)}
    for name, (min_value, max_value) in bounds.items():
        if not min_value <= (value := getattr(options, name)) <= max_value:
            raise parsed.wrong(f"{name} is {value}", f"choose {min_value} to {max_value}", key=name)
    kind = cast(Literal["ngram", "suffix", "draft"], parsed.name)
    return Speculation(kind=kind, model=model, **vars(options))


def check_speculation(text: str, *, routed_experts: bool, devices: int) -> None:
    """Check the flag's text, and that engines with these settings can speculate.

    Args:
        devices: number of devices of an engine.

    Raises:
        ConfigError: the text is invalid, or the engine's settings rule speculation out.
    """
    speculation = read_speculation(text)
    if speculation is not None and routed_experts:
        raise ConfigError(
            "--generator.speculation does not go with --trainer.router-replay: engines would also return the "
            "experts of rejected drafts",
            hint="leave one of them out",
        )
    if speculation is None or speculation.kind != "draft":
        return
    if device_type() == "cuda":
        raise ConfigError("--generator.speculation draft: draft models run on CPU engines only", hint="use suffix")
    if devices > 1:
        raise ConfigError(
            f"--generator.speculation draft: a draft model runs on one device, and an engine has {devices}",
            hint="use suffix, or set --generator.tensor-parallel-size and --generator.data-parallel-size to 1",
        )


def resolve_draft_model(text: str, policy: Path, cache: Path, progress: Progress | None = None) -> str:
    """Return the flag's text with the folder of its draft model in place of the model's name, if there is one.

    Args:
        policy: the policy's folder, whose tokenizer the draft model must have.
        cache, progress: as for `resolve_model`.

    Raises:
        ConfigError: the draft model has another tokenizer.
        ModelError: the draft model is not found, or is incomplete.
    """
    from forge_rl.engines.architecture import read_architecture  # imports torch, which reading flags need not

    speculation = read_speculation(text)
    if speculation is None or not speculation.model:
        return text
    try:
        folder = resolve_model(speculation.model, cache, progress).resolve()
        check_same_tokens(f"the draft model {speculation.model}", folder, policy)
        folder = dequantized(folder, cache, progress) if read_architecture(folder).quantized else folder
    except ModelError as error:
        raise ModelError(f"the draft model {speculation.model}: {error.message}", hint=error.hint) from error
    # The folder goes into the flag's text, where commas and colons separate options.
    quote = "'" if '"' in str(folder) else '"'
    options = "".join(f",{name}={getattr(speculation, name)}" for name in _Options.__annotations__)
    return f"draft:{quote}{folder}{quote}{options}"


class DraftSwitch:
    """Turns drafts off while many requests run, while too few drafted tokens are accepted, and where they lose time.

    Tokens per second of steps with and without drafts are measured separately for 1, 2 to 3, 4 to 7, ... running
    requests; every 32nd step is of the other kind, so that both stay measured. The counts of drafted and accepted
    tokens decay by `_DECAY` with each step that verified a draft, so they cover about the last hundred.

    Args:
        settings: the thresholds.
        clock: returns seconds.
    """

    def __init__(self, settings: Speculation, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._drafted = self._accepted = 0.0
        self._steps = 0
        self._speeds: dict[tuple[int, bool], deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        """New tokens per request and seconds of recent steps, by size of the batch and whether the step drafted."""
        self._last: tuple[set[str], bool, float] = set(), False, 0.0
        """Requests of the last step, whether it drafted, and when it began."""

    def note(self, drafted: int, accepted: int) -> None:
        """Count the tokens that one step verified and accepted."""
        if drafted:
            self._drafted = _DECAY * self._drafted + drafted
            self._accepted = _DECAY * self._accepted + accepted

    def allows(self, requests: Sequence[str], tokens: int) -> bool:
        """Return whether the next step may verify drafts; called between any two steps.

        Args:
            requests: the running requests.
            tokens: number of their tokens that the last step sampled.
        """
        running = len(requests)
        # A batch this large is bound by compute, and the next step's time must not be taken for a small one's.
        if running > self._settings.max_running:
            self._last = set(), False, 0.0
            return False
        # Steps of 1, 2 to 3, 4 to 7, ... requests are measured apart.
        size, start_s = running.bit_length(), self._clock()
        last_requests, drafted, last_start_s = self._last
        if last_requests == set(requests):  # else the step also computed prompts
            self._speeds[size, drafted].append((tokens / running, start_s - last_start_s))
        pays_off = self._accepts() and not (self._settings.adaptive and self._loses(size))
        may_draft = pays_off
        if self._settings.adaptive or not pays_off:
            self._steps += 1
            has_speeds = not self._settings.adaptive or len(self._speeds[size, not pays_off]) >= _MEASURED
            may_draft ^= self._steps % (_RETRY if has_speeds else _FIRST_RETRY) == 0
        self._last = set(requests), may_draft, start_s
        return may_draft

    def _accepts(self) -> bool:
        return self._drafted < _ENOUGH or self._accepted >= self._settings.min_accepted * self._drafted

    def _loses(self, size: int) -> bool:
        """Return whether steps with drafts yield fewer tokens per second; outliers, such as pauses, are ignored."""
        speeds = [self._speeds[size, drafted] for drafted in (True, False)]
        if any(len(steps) < _MEASURED for steps in speeds):
            return False
        draft_speed, plain_speed = (
            # The median of the seconds, so that single steps that were held up do not count.
            statistics.fmean(tokens for tokens, _ in steps) / statistics.median(seconds for _, seconds in steps)
            for steps in speeds
        )
        return draft_speed < plain_speed
