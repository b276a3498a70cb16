"""Given examples: batches of episodes that are not sampled but made from tasks, for supervised training."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from forge_rl.data.given_text import unread_names
from forge_rl.data.scan import template_digest
from forge_rl.data.sources import Source
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import ConfigError, TaskError
from forge_rl.metrics import RolloutStatus
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Batch, Episode, Group, Task

ExampleFn: TypeAlias = Callable[[Task, Tokenizer], Sequence[Episode]]
"""Makes the group of a task's given episodes: one to imitate, or two to compare. Their turns are `Turn.given`. Raises
TaskError for a task that cannot be used. Called in threads."""

_FEW_TASKS = 100
"""The share of unusable tasks is taken of at least this many."""
_FRAME_TOKENS = 32
"""Maximum tokens that a chat template adds around a message."""
_MAX_NAMES = 20
_LONGER_ROWS = "raise --trainer.seq-len, or --trainer.context-parallel-degree to split rows over more devices"


class ExampleMaker:
    """Makes groups of given episodes that fit into the trainer's rows.

    Args:
        longest: maximum tokens of a row.
    """

    def __init__(self, make: ExampleFn, tokenizer: Tokenizer, *, longest: int) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self._make = make

    @property
    def name(self) -> str:
        """Name of the function, with the arguments of a partial."""
        function = getattr(self._make, "func", self._make)
        name = f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
        return f"{name} {getattr(self._make, 'args', ())} {getattr(self._make, 'keywords', {})}"

    def group(self, task: Task) -> Group:
        """Make a task's group.

        Raises:
            TaskError: the task cannot be used.
            ConfigError: the function returned something else than given episodes.
        """
        group = self.any_length(task)
        if (needed := row_tokens(group)) > self.longest:
            raise TaskError(
                f"an example of {needed:,} tokens is longer than a row of {self.longest:,}",
                hint=_LONGER_ROWS,
            )
        return group

    def any_length(self, task: Task) -> Group:
        """Make a task's group, even if it is too long; errors as in `group`."""
        episodes = tuple(self._make(task, self.tokenizer))
        if not episodes or not any(episode.response_tokens for episode in episodes):
            raise TaskError("it has no tokens to learn", hint="give it an answer")
        # Given tokens have the version -1: no weights of the run produced them.
        if any((turn.versions >= 0).any() for episode in episodes for turn in episode.turns):
            raise ConfigError(
                f"an example of {task.source!r} claims to be sampled by a version of the weights",
                hint="make its turns with Turn.given",
            )
        return Group(task=task, episodes=episodes)

    def try_groups(self, tasks: Sequence[Task]) -> list[Group | TaskError]:
        """Make the groups of several tasks; errors of single tasks are returned in their places."""
        return [self._try(task) for task in tasks]

    def _try(self, task: Task) -> Group | TaskError:
        try:
            return self.group(task)
        except TaskError as error:
            return error


def row_tokens(group: Group) -> int:
    """Return the tokens of the row that a group's longest segment needs: all but the last, which nothing follows."""
    return max((len(s.token_ids) - 1 for episode in group.episodes for s in episode.segments), default=0)


def rewritten_turns(group: Group) -> int:
    """Return how many turns do not continue the tokens of the one before, because the chat template changes earlier
    turns; most leave out their thoughts. Each such turn is trained in a sequence of its own, with all of its text."""
    return sum(max(0, len(episode.segments) - 1) for episode in group.episodes)


class ExampleLengths:
    """Finds tasks whose examples do not fit into a row.

    Most examples need not be made for that, as a token has at least one byte.
    """

    measured = "they"
    hint = _LONGER_ROWS

    def __init__(self, maker: ExampleMaker) -> None:
        self.limit = maker.longest
        self._maker = maker
        self._made = self._rewritten = 0
        self._unread: set[str] = set()

    def too_long(self, task: Task) -> bool:
        """Return whether a task's longest segment exceeds the limit.

        Raises:
            ModelError: the chat template refuses the task.
            TaskError: the task cannot be used.
        """
        # An upper bound: a token has at least one byte, and JSON writes a character of n bytes in at least n
        # characters.
        texts = *map(dict, task.messages), *map(dict, task.tools), dict(task.truth)
        max_tokens = _FRAME_TOKENS * (len(texts) + 1) + len(json.dumps(texts, default=str))
        return max_tokens > self.limit and self.length(task) > self.limit

    def length(self, task: Task) -> int:
        """Return the number of tokens of the row that a task needs; errors as in `too_long`."""
        group = self._maker.any_length(task)
        self._made += 1
        self._rewritten += rewritten_turns(group) > 0
        sequences = (segment.token_ids for episode in group.episodes for segment in episode.segments)
        self._unread |= unread_names(task, sequences, self._maker.tokenizer)
        return row_tokens(group)

    def take_note(self) -> str:
        """Return a note about the examples made since the last call, or ""."""
        examples, rewritten, unread = self._made, self._rewritten, sorted(self._unread)
        self._made = self._rewritten = 0
        self._unread = set()
        notes: list[str] = []
        if rewritten:
            notes.append(
                f"{rewritten:,} of the {examples:,} looked at are trained turn by turn, as the chat template changes "
                "earlier turns, such as by leaving out their thoughts"
            )
        if unread:
            names = ", ".join(unread[:_MAX_NAMES] + ["..."] * (len(unread) > _MAX_NAMES))
            notes.append(f"neither shown to the model nor trained: {names}")
        return "; ".join(notes)

    def digest(self) -> str:
        """Return a digest of the tokenizer, its chat template, and the function that makes the examples."""
        return f"{template_digest(self._maker.tokenizer)} {self._maker.name}"


class Examples:
    """Draws tasks from the mixture and makes batches of given episodes of them.

        batch = await run.examples.next_batch()

    A task that cannot be used is skipped, counted, and replaced by another of its source, up to the share
    --data.max-bad-rows.

    Args:
        tasks: tasks in batch order.
        sources: the mixture's sources by name.
        groups: P, tasks per batch.
    """

    def __init__(
        self, tasks: ResumableTaskStream, sources: Mapping[str, Source], maker: ExampleMaker, *, groups: int
    ) -> None:
        self.last: Batch | None = None
        """The last delivered batch."""
        self._tasks = tasks
        self._sources = sources
        self._maker = maker
        self._groups = groups
        self._order: list[str] = []
        """Source of each group of the batch being made."""
        self._drawn: list[Task] = []
        """Tasks of these groups that have been drawn."""
        self._batches = 0
        """Number of delivered batches."""
        self._counts = {name: Counter[str]() for name in sources}
        """Tasks drawn and skipped since this process started, by source."""

    async def next_batch(self) -> Batch:
        """Return the next batch: P groups in the mixture's proportions.

        Its version is the number of batches before it. After an error, the next call continues with the same tasks.

        Raises:
            TaskError: too many tasks of a source cannot be used.
            ConfigError: groups have different numbers of episodes.
        """
        # Kept until the batch is delivered, as are the drawn tasks: after an error, the next call goes on with the same
        # ones.
        self._order = self._order or self._tasks.source_order(self._groups)
        groups_by_place: dict[int, Group] = {}
        while len(groups_by_place) < len(self._order):
            for source in self._order[len(self._drawn) :]:
                self._drawn.append(self._draw(source))
            # Places whose task could not be used get another one of the same source, and another try.
            missing = [place for place in range(len(self._order)) if place not in groups_by_place]
            results = await asyncio.to_thread(self._maker.try_groups, [self._drawn[place] for place in missing])
            for place, result in zip(missing, results, strict=True):
                if isinstance(result, Group):
                    groups_by_place[place] = result
                    self._counts[self._order[place]]["rewritten_turns"] += rewritten_turns(result)
                else:
                    self._skip(self._drawn[place], result)
                    # From the same source, so that the batch keeps the mixture's proportions.
                    self._drawn[place] = self._draw(self._order[place])
        groups = tuple(groups_by_place[place] for place in range(len(self._order)))
        _check_sizes(groups)
        self._tasks.batch_delivered(groups)
        self._order, self._drawn = [], []
        self.last = Batch(groups=groups, version=self._batches)
        self._batches += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """Return the numbers of skipped tasks and of rewritten turns (see `rewritten_turns`), for each source that has
        any."""
        return {
            f"data/{name}/{count}": float(counts[count])
            for name, counts in self._counts.items()
            for count in ("skipped", "rewritten_turns")
            if counts[count]
        }

    def status(self) -> RolloutStatus:
        """Return the progress of the next batch."""
        return RolloutStatus(batch=self._batches, groups_done=0, groups=self._groups)

    def state(self) -> dict[str, object]:
        """Return the state of the mixture and the batches as JSON; tasks of a batch being made will be drawn again."""
        return {
            "mixture": self._tasks.state(),
            "used": self._tasks.consumed(self._drawn),
            "batches": self._batches,
        }

    async def restore(self, state: dict[str, object]) -> None:
        """Continue from a saved state.

        Raises:
            TaskError: the state was not made by `state`.
        """
        match state:
            case {"mixture": dict(mixture), "used": list(used), "batches": int(batches)}:
                self._tasks.restore(mixture, used)
                self._order, self._drawn, self._batches, self.last = [], [], batches, None
            case _:
                raise TaskError(
                    f"the saved state of the examples has unexpected contents: {sorted(state)}", hint="start a new run"
                )

    async def reset(self, state: dict[str, object], *, seed: int) -> None:
        """Begin again from the state before the first batch, with a seed for the order of tasks.

        Raises:
            TaskError: a source cannot begin again, or has no other order.
        """
        await self.restore(state)
        self._tasks.reseed(seed)

    def __repr__(self) -> str:
        return f"Examples  {self._batches} batches of {self._groups} groups delivered"

    def _draw(self, source: str) -> Task:
        self._counts[source]["drawn"] += 1
        return self._tasks.draw_from(source)

    def _skip(self, task: Task, error: TaskError) -> None:
        """Count an unusable task.

        Raises:
            TaskError: there are too many.
        """
        counts, max_bad_share = self._counts[task.source], getattr(self._sources[task.source], "max_bad_rows", 0.0)
        counts["skipped"] += 1
        describe = getattr(self._sources[task.source], "describe_task", None)
        row = (describe(task) if describe else "") or f"{task.source} {task.id}"
        if counts["skipped"] <= max_bad_share * max(counts["drawn"], _FEW_TASKS):
            return
        if max_bad_share == 0:
            raise TaskError(f"{row}: {error.message}", hint=error.hint) from error
        raise TaskError(
            f"{counts['skipped']} of {counts['drawn']} tasks of {task.source!r} cannot be used, more than "
            f"--data.max-bad-rows {max_bad_share:g}; one is {row}: {error.message}",
            hint=error.hint,
        ) from error


def _check_sizes(groups: Sequence[Group]) -> None:
    """Refuse groups of different sizes.

    Raises:
        ConfigError: two groups differ in size; names both.
    """
    first = groups[0]
    for group in groups:
        if len(group.episodes) != len(first.episodes):
            raise ConfigError(
                f"{group.task.source} {group.task.id} has {len(group.episodes)} episodes, {first.task.source} "
                f"{first.task.id} has {len(first.episodes)}",
                hint="return as many for each task",
            )
