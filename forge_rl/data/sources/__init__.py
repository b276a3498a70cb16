"""Sources: resumable streams of tasks, one file a kind, each with a held-out part that is never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forge_rl.data.sources.reasoning_gym import ReasoningGymSource
from forge_rl.data.sources.spec import SourceSpec, parse_source
from forge_rl.errors import TaskError
from forge_rl.types import Task

__all__ = ["ReasoningGymSource", "Source", "SourceSpec", "make_sources", "parse_source"]


class Source(Protocol):
    """A resumable stream of tasks, the same for the same seed.

    source = ReasoningGymSource("chain_sum", {"max_terms": 3}, seed=0, held_out_share=0.1)
    task = source.draw()
    source.restore(json.loads(json.dumps(source.state())))
    """

    @property
    def name(self) -> str:
        """Identifies the source in logs and in the mixture."""

    def draw(self) -> Task:
        """Return the next task to train on; never one that is held out."""

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return the first `tasks` held-out tasks, or all if fewer: distinct questions, the same for every seed."""

    def state(self) -> dict[str, object]:
        """Position of the stream, as JSON."""

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position."""


def make_sources(
    specs: Sequence[SourceSpec], seed: int, held_out_share: float, *, instruction: str = "", system: str = ""
) -> dict[str, Source]:
    """Build the source of each spec, in their order; specs of one data set are named by their parameters too.

    Every spec names a reasoning-gym data set so far: another kind of source is another file beside it, chosen here.

    Raises:
        TaskError: the same spec twice; an unknown data set or parameter, or a value that it refuses.
    """
    names = [spec.name for spec in specs]
    sources: dict[str, Source] = {}
    for spec in specs:
        name = spec.name if names.count(spec.name) == 1 else spec.label
        if name in sources:
            raise TaskError(f"the tasks {name!r} are named twice", hint="name them once, with the sum of the weights")
        sources[name] = ReasoningGymSource(spec.name, spec.params, seed, held_out_share, name, instruction, system)
    return sources
