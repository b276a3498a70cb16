"""Reads the flag --generator.speculation: who drafts tokens ahead, and when drafts are not worth their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from forge_rl.errors import ConfigError
from forge_rl.flags.options import read_options
from forge_rl.flags.texts import parse, suggest

OFF = "off"
_KINDS = ("ngram", "suffix")
_DECAY = 0.99
_ENOUGH = 32
"""Number of drafted tokens from which on their accepted share counts."""
_RETRY = 32
"""While drafts are off, each how many steps one is made to measure again."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    max_tokens: int = 8
    """Maximum tokens of a draft."""
    max_running: int = 8
    """Maximum running requests for which tokens are drafted; with more, a step is bound by compute."""
    min_accepted: float = 0.3
    """Share of drafted tokens that must be accepted; below it, drafts are made only now and then, to measure again."""


@dataclass(frozen=True, kw_only=True)
class Speculation(_Options):
    """Settings of speculative decoding."""

    kind: Literal["ngram", "suffix"]
    """Where drafts come from: ngram, the request's own text; suffix, also other answers to the same prompt."""


def read_speculation(text: str) -> Speculation | None:
    """Return the settings that a text names, or None for "off".

        read_speculation("suffix:max_tokens=16,max_running=4")

    Raises:
        ConfigError: the kind or an option is unknown, or an option has an invalid value.
    """
    bundled = (OFF, *_KINDS, "draft")
    parsed = parse(text, "--generator.speculation", bundled=bundled, takes_argument=True, takes_weight=False)
    if parsed.name == "draft":
        raise parsed.wrong("draft models are not supported", "use suffix; see docs/concepts/speculation.md")
    if parsed.name not in bundled:
        raise parsed.wrong(f"unknown kind {parsed.name!r}", suggest(parsed.name, (OFF, *_KINDS), "kinds"))
    if parsed.argument or (parsed.name == OFF and parsed.written):
        raise parsed.wrong(f"{parsed.name} does not take this", "write off, or KIND:max_tokens=8")
    if parsed.name == OFF:
        return None
    options = _Options(**read_options(parsed, _Options))
    bounds = {"max_tokens": (1, 64), "max_running": (1, 1 << 16), "min_accepted": (0, 1)}
    for name, (least, most) in bounds.items():
        if not least <= (value := getattr(options, name)) <= most:
            raise parsed.wrong(f"{name} is {value}", f"choose {least} to {most}", at=name)
    return Speculation(kind=cast(Literal["ngram", "suffix"], parsed.name), **vars(options))


def check_speculation(text: str, *, routed_experts: bool) -> None:
    """Check the flag's text, and that engines with these settings can speculate.

    Raises:
        ConfigError: the text is invalid, or the engine's settings rule speculation out.
    """
    if read_speculation(text) is not None and routed_experts:
        raise ConfigError(
            "--generator.speculation does not go with --trainer.router-replay: engines would also return the "
            "experts of rejected drafts",
            hint="leave one of them out",
        )


class DraftSwitch:
    """Turns drafts off while many requests run, and while too few drafted tokens are accepted.

    Both sums below decay by `_DECAY` with each step that verified a draft, so that they cover about the last hundred.

    Args:
        settings: the thresholds.
    """

    def __init__(self, settings: Speculation) -> None:
        self._settings = settings
        self._drafted = self._accepted = 0.0
        self._steps_off = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Count the tokens that one step verified and accepted."""
        if drafted:
            self._drafted = _DECAY * self._drafted + drafted
            self._accepted = _DECAY * self._accepted + accepted

    def allows(self, running: int) -> bool:
        """Return whether the next step may verify drafts, with this many running requests."""
        if running > self._settings.max_running:
            return False
        if self._drafted < _ENOUGH or self._accepted >= self._settings.min_accepted * self._drafted:
            return True
        self._steps_off += 1
        return self._steps_off % _RETRY == 0
