"""Data configs that recipes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import ReasoningGymSource, Source, parse_source
from forge_rl.errors import ConfigError, TaskError

ONE_DIGIT_ADDITION = (
    "basic_arithmetic:min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=[+],allow_parentheses=false,"
    "format_style=natural"
)
"""Additions such as "Calculate 4 + 7.", in many wordings."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymData:
    """Tasks that reasoning-gym generates: how they are asked, and which of them are held out.

    sources = ReasoningGymData(instruction=" Think first.").build(["chain_sum*2", "leg_counting"], seed=0)
    """

    instruction: str = " Answer with a number."
    """Text that is added to every question."""
    system: str = ""
    """System message of every task; the model's own default if empty."""
    held_out_share: float = 0.25
    """Share of all tasks that is set apart for evaluation; which ones does not depend on the seed."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share < 1:
            raise ConfigError(
                f"--data.held-out-share is {self.held_out_share}", hint="set --data.held-out-share between 0 and 1"
            )

    def build(self, tasks: Sequence[str], *, seed: int) -> Mixture:
        """Makes the mixture of these data sets, `name[:key=value,...][*weight]`; the seed orders the training tasks.

        Several data sets of one name are told apart by their parameters too.

        Raises:
            ConfigError: no tasks are named.
            TaskError: an unknown data set or parameter, or the same data set twice.
        """
        if not tasks:
            raise ConfigError("no tasks are named", hint="give --tasks at least one reasoning-gym data set")
        specs = [parse_source(text) for text in tasks]
        names = [spec.name for spec in specs]
        sources: dict[str, Source] = {}
        for spec in specs:
            name = spec.name if names.count(spec.name) == 1 else spec.label
            if name in sources:
                raise TaskError(
                    f"the tasks {name!r} are named twice", hint="name them once, with the sum of the weights"
                )
            sources[name] = ReasoningGymSource(
                spec.name, spec.params, seed, self.held_out_share, name, self.instruction, self.system
            )
        return Mixture(sources, {name: spec.weight for name, spec in zip(sources, specs, strict=True)})
