"""Source of tasks from any Python iterable: a list, a generator function, another package's data set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge_rl.data.sources.order import key_of, permuted
from forge_rl.data.sources.rows import Columns, prompt_key
from forge_rl.data.sources.tables import RowError
from forge_rl.errors import TaskError
from forge_rl.types import Task

Item = Task | Mapping[str, object]
Items = Iterable[Item] | Callable[[], Iterable[Item]]

_FRUITLESS = 10_000
"""Consecutive items without a new held-out problem after which the search stops."""


@dataclass(eq=False, repr=False)
class IterableSource:
    """Source of tasks, or of rows like a file's, from an iterable; implements Source.

        source = IterableSource("sums", [{"question": "2+3?", "answer": "5"}], seed=0)
        source = IterableSource("sums", generate)  # a function that returns an iterator

    A sequence is reshuffled by the seed in each epoch. Other iterables keep their order and start over at their end.
    They must yield the same items each time, as a resumed run skips the items that it has used. A bare iterator can
    neither start over nor have a held-out part: the source ends when it does.
    """

    name: str
    items: Items
    seed: int = 0
    held_out_share: float = 0.1
    """Share of the problems that is held out, from 0 to 1; with 1, the source is evaluation-only."""
    columns: Columns = field(default_factory=Columns)
    """Mapping of a row's columns to a task; unused for items that are tasks."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_share <= 1:
            raise TaskError(f"held_out_share is {self.held_out_share}", hint="set it from 0 to 1, such as 0.1")
        if not callable(self.items) and not isinstance(self.items, Iterable):
            raise TaskError(
                f"the source {self.name!r} is a {type(self.items).__name__}, which cannot be iterated over",
                hint="give a list of tasks or rows, or a function that returns an iterator of them",
            )
        if isinstance(self.items, str | bytes | Mapping):
            raise TaskError(
                f"the source {self.name!r} is a {type(self.items).__name__}, not rows or tasks",
                hint='give a list such as [{"question": "2+3?", "answer": "5"}]; pass files to --tasks',
            )
        self._left_out: frozenset[int] = frozenset()
        self._begun: Iterator[Item] | None = None
        self._epoch = self._index = 0

    def __repr__(self) -> str:
        return f"{self.name} epoch {self._epoch}, {self._index} items"

    @property
    def epoch(self) -> float:
        """Number of completed passes, plus the fraction of the current one if its length is known."""
        return self._epoch + (self._index / len(self.items) if isinstance(self.items, Sequence) else 0.0)

    def leave_out(self, problems: Collection[int]) -> None:
        """Do not draw tasks of these problems, given by their keys."""
        self._left_out = frozenset(problems)

    def problems(self, max_items: int, *, held_out: bool) -> Iterator[int]:
        """Yield the keys of the problems that are held out, or of the others, of the first `max_items` items.

        A bare iterator, which can be read only once, yields none.
        """
        if not self._once:
            for item in itertools.islice(self._pass(None), max_items):
                _, problem = self._task(item)
                if self._is_held_out(problem) == held_out:
                    yield problem

    def draw(self) -> Task:
        """Return the next task to train on.

        Raises:
            TaskError: an item is not a valid task or row, the iterator is exhausted, or all items are held out.
        """
        while True:
            if self._begun is None:
                self._begun = self._pass(self._epoch)
            # A whole pass without a task would repeat forever; a part of one, after a restart, may just be at its end.
            is_whole_pass = self._index == 0
            for item in self._begun:
                self._index += 1
                task, problem = self._task(item)
                if not self._is_held_out(problem) and problem not in self._left_out:
                    return task
            if self._once:
                raise TaskError(
                    f"the iterator of {self.name!r} ended after {self._index} items",
                    hint="give a list, or a function that returns the iterator, so that it can start over",
                )
            if is_whole_pass:
                raise TaskError(
                    f"the source {self.name!r} has nothing to train on: {self._index} items, all held out or evaluated",
                    hint="add items, or lower the held-out share",
                )
            self._epoch, self._index, self._begun = self._epoch + 1, 0, None

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return up to `tasks` held-out tasks; none for a bare iterator."""
        if self._once or self.held_out_share == 0 or tasks == 0:
            return ()
        held_out_tasks: dict[int, Task] = {}
        fruitless = 0
        for item in self._pass(None):
            task, problem = self._task(item)
            # An endless iterable has no end to wait for; the search stops once new problems become rare.
            fruitless = 0 if problem not in held_out_tasks and self._is_held_out(problem) else fruitless + 1
            if self._is_held_out(problem):
                held_out_tasks.setdefault(problem, task)
            if len(held_out_tasks) == tasks or fruitless > _FRUITLESS:
                break
        return tuple(held_out_tasks.values())

    def state(self) -> dict[str, object]:
        return {"seed": self.seed, "held_out_share": self.held_out_share, "epoch": self._epoch, "index": self._index}

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved position by skipping the items before it.

        Raises:
            TaskError: the state has another seed or share, a bare iterator is past it, or there are too few items.
        """
        epoch, index = state.get("epoch"), state.get("index")
        if not isinstance(epoch, int) or not isinstance(index, int):
            raise TaskError(f"the saved state of source {self.name!r} is malformed: {dict(state)}")
        if {**self.state(), "epoch": epoch, "index": index} != dict(state):
            raise TaskError(
                f"the saved state of source {self.name!r} has another seed or held-out share: {dict(state)}",
                hint="resume with the original settings, or start a new run",
            )
        skip = index
        if self._once:
            # A bare iterator cannot go back: only items after its current place can be skipped.
            skip = index - self._index
            if skip < 0:
                raise TaskError(
                    f"the iterator of {self.name!r} is at item {self._index} and cannot go back to {index}",
                    hint="give a list, or a function that returns the iterator, so that it can start over",
                )
            self._begun = self._begun or self._pass(epoch)
        else:
            self._begun = self._pass(epoch)
        self._epoch, self._index = epoch, index
        num_passed = sum(1 for _ in itertools.islice(self._begun, skip))
        if num_passed < skip:
            raise TaskError(
                f"the source {self.name!r} ended after {num_passed} items, but the run was saved after {skip}",
                hint="make the source yield the same items each time",
            )

    def reseed(self, seed: int) -> None:
        """Begin again, a sequence in the order of another seed. A bare iterator continues."""
        self.seed = seed
        if not self._once:
            self._begun, self._epoch, self._index = None, 0, 0

    @property
    def _once(self) -> bool:
        """True for a bare iterator."""
        return isinstance(self.items, Iterator)

    def _pass(self, epoch: int | None) -> Iterator[Item]:
        """Start a pass: shuffled for an epoch if `items` is a sequence; in the original order if `epoch` is None."""
        items = self.items() if callable(self.items) else self.items
        if epoch is None or not isinstance(items, Sequence):
            return iter(items)
        size, key = len(items), key_of(self.seed, epoch)
        # Shuffled without a list of indices: any place of any epoch is computed from seed and epoch.
        return (items[permuted(place, size, key)] for place in range(size))

    def _task(self, item: Item) -> tuple[Task, int]:
        if isinstance(item, Task):
            # A task keeps its id, but belongs to the source that the mixture draws from.
            return replace(item, source=self.name), prompt_key(item.messages)
        try:
            if not isinstance(item, Mapping):
                raise RowError(f"is a {type(item).__name__}, neither a task nor a mapping", value=item)
            return self.columns.read({str(name): value for name, value in item.items()}, self.name)
        except RowError as error:
            raise TaskError(f"source {self.name!r}, item {self._index}: {error}", hint=error.hint) from None

    def _is_held_out(self, problem: int) -> bool:
        # A problem's key is a uniform 64-bit hash, so this share of problems is held out, whatever the order or the
        # seed.
        return problem < self.held_out_share * 2**64
