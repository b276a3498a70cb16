"""Source of procedural tasks from a reasoning-gym data set, generated without end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import TaskError, check_installed
from forge_rl.flags.texts import suggest
from forge_rl.types import Message, Task

_CHUNK = 500
"""Size of one reasoning-gym data set; some generate all tasks at creation, so a stream is a sequence of data sets."""
_SET_HERE = ("seed", "size")
"""Fields of every reasoning-gym config that the source sets itself."""
_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)?|[^\w\s]|_")
_ORIGIN = ("source_dataset", "source_index", "difficulty")
"""Metadata of every entry that is not part of its problem."""
_REFUSED = {
    "propositional_logic": "any premise, copied from the question, is a valid conclusion",
    "composite": "its tasks are those of other data sets, whose scorers it calls unguarded",
}
"""Data sets that reward no skill, with the reason."""
_COPIED = {"string_insertion": ("string", "min_string_length=200,max_string_length=300")}
"""Data sets whose answer may be a copy from the question: the metadata that is copied, and parameters that help."""
_MOST_COPIES = 0.5
_TRIED_ENTRIES = 100
_NO_CONTENT = {"true", "false", "none"}


@dataclass(eq=False, repr=False)
class ReasoningGymSource:
    """Tasks of a reasoning-gym data set; implements Source.

        source = ReasoningGymSource("chain_sum", {"max_terms": 3}, seed=0, held_out_share=0.1)

    Whether a question is held out depends only on a hash of its problem, see `problem_of`, not on its wording, the seed
    or the parameters that generated it. So scores are comparable across seeds, and no held-out problem is ever trained
    on.

    Raises:
        TaskError: the data set or a parameter is unknown, or a value is refused.
    """

    dataset: str
    """Name in reasoning-gym."""
    params: Mapping[str, object]
    """Fields of the data set's config."""
    seed: int
    """Seed of the training stream."""
    held_out_share: float
    """Share of all distinct questions that is held out, at least 0 and below 1."""
    name: str = ""
    """Name of the source; defaults to the data set's name."""
    instruction: str = ""
    """Text appended to each question, including the separating blank or line break."""
    system: str = ""
    """System message, or "" for none."""
    is_endless: ClassVar[bool] = True
    """See `Source`."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_share < 1:
            raise TaskError(
                f"held_out_share is {self.held_out_share}", hint="set it to at least 0 and below 1, such as 0.1"
            )
        if reason := _REFUSED.get(self.dataset):
            raise TaskError(
                f"data set {self.dataset!r} is not offered: {reason}", hint="name other data sets of reasoning-gym"
            )
        self.params = dict(self.params)
        self.name = self.name or self.dataset
        self.reseed(self.seed)
        self._check_copies()

    def __repr__(self) -> str:
        params = ", ".join(f"{key}={value!r}" for key, value in self.params.items())
        return f"{self.dataset}({params}) seed {self.seed}, {self._index} generated"

    def draw(self) -> Task:
        """Return the next task to train on.

        Raises:
            TaskError: all questions are held out, or the data set fails with these parameters.
        """
        # A run of this many held-out questions has a chance of about e^-200, unless all of them are.
        for _ in range(math.ceil(200 / (1 - self.held_out_share))):
            entry = self._stream[self._index]
            self._index += 1
            if not self._is_held_out(entry):
                return self._task(entry)
        raise TaskError(
            f"{self._described()} has so few questions that all are held out",
            hint="choose parameters that generate more questions, or lower the held-out share",
        )

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """Return held-out tasks; generates about tasks / held_out_share entries, which is slow for a few data sets.

        Raises:
            TaskError: no question is held out, or the data set fails with these parameters.
        """
        if tasks > 0 and self.held_out_share == 0:
            raise TaskError(f"nothing of {self._described()} is held out", hint="set a held-out share above 0")
        # A stream of its own, so that held-out tasks are the same for every seed.
        stream = _Stream(self.dataset, self.params, "held out")
        held_out_tasks: dict[str, Task] = {}
        index = last_new = 0
        while len(held_out_tasks) < tasks and index - last_new < 200 / self.held_out_share:
            entry = stream[index]
            index += 1
            if self._is_held_out(entry) and entry["question"] not in held_out_tasks:
                held_out_tasks[str(entry["question"])] = self._task(entry)
                last_new = index
        if tasks > 0 and not held_out_tasks:
            raise TaskError(
                f"{self._described()} has so few questions that none is held out",
                hint="choose parameters that generate more questions, or raise the held-out share",
            )
        return tuple(held_out_tasks.values())

    def state(self) -> dict[str, object]:
        return {"dataset": self.dataset, "params": self.params, "seed": self.seed, "index": self._index}

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from a saved position; raises TaskError if the state belongs to another stream."""
        index = state.get("index")
        expected = {**self.state(), "index": index}
        # Compared as JSON, as a saved state is: tuples in the parameters come back as lists.
        if not isinstance(index, int) or _as_json(expected) != _as_json(dict(state)):
            raise TaskError(
                f"the saved state of source {self.name!r} belongs to another stream: {dict(state)}, not {expected}",
                hint="resume with the original tasks and seed, or start a new run",
            )
        self._index = index

    def reseed(self, seed: int) -> None:
        """Begin again, with the tasks of another seed."""
        self.seed = seed
        self._stream = _Stream(self.dataset, self.params, f"seed {seed}")
        self._index = 0

    def _check_copies(self) -> None:
        """Refuse parameters with which a copy from the question solves most tasks."""
        name, better = _COPIED.get(self.dataset, ("", ""))
        if not name:
            return
        # Tried on a sample, as whether copies are right depends on the parameters and not only on the data set.
        entries = [self._stream[index] for index in range(_TRIED_ENTRIES)]
        copies = sum(_metadata(entry).get(name) == entry["answer"] for entry in entries)
        if copies > _MOST_COPIES * len(entries):
            raise TaskError(
                f"{self._described()}: in {copies} of {len(entries)} tasks the answer is the question's own {name}, so "
                "that copying it is what a policy learns",
                hint=f"choose parameters that change more of them: {self.dataset}:{better}",
            )

    def _is_held_out(self, entry: Mapping[str, object]) -> bool:
        return int(_digest(_as_json(problem_of(entry))), 16) < self.held_out_share * 2**64

    def _task(self, entry: dict[str, object]) -> Task:
        question = str(entry["question"])
        messages: tuple[Message, ...] = ({"role": "user", "content": question + self.instruction},)
        if self.system:
            messages = ({"role": "system", "content": self.system}, *messages)
        # Puzzles with many solutions have no answer.
        answer = {"answer": entry["answer"]} if entry.get("answer") is not None else {}
        return Task(
            id=f"{self.dataset}/{_digest(question)}",
            source=self.name,
            messages=messages,
            truth={"dataset": self.dataset, "params": self.params, "entry": entry, **answer},
            verifier="reasoning_gym",
        )

    def _described(self) -> str:
        return f"data set {self.dataset!r} with {self.params} and held_out_share {self.held_out_share}"


def problem_of(entry: Mapping[str, object]) -> list[str]:
    """Reduce a question to its problem: its numbers, and the words and symbols that also occur in its metadata.

        problem_of({"question": "What is 4 + 3?", "metadata": {"expression": "4 + 3"}}) == ["+", "3", "4"]

    The rest is wording. The terms of a sum or product are sorted, as their order does not matter. If the metadata
    shares nothing with the question, any word may matter, and the problem is the whole question.
    """
    question = _TOKEN.findall(str(entry["question"]).lower())
    # Words of the question that are not in the metadata are taken for wording, which the data set varies.
    content = set(_TOKEN.findall(" ".join(_leaves(entry.get("metadata"))).lower())) - _NO_CONTENT
    if content.isdisjoint(question):
        return question
    problem = [token for token in question if token in content or token[0].isdigit()]
    symbols = {token for token in problem if not token[0].isdigit()}
    return sorted(problem) if symbols in ({"+"}, {"*"}) else problem


def _metadata(entry: Mapping[str, object]) -> Mapping[str, object]:
    metadata = entry.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _leaves(value: object) -> Iterator[str]:
    """Yield all texts and numbers in an entry's metadata, except those that only describe its origin."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _ORIGIN:
                yield from _leaves(part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _leaves(part)
    else:
        yield str(value)


class _Stream:
    """Endless sequence of a data set's entries, in an order determined by `key`."""

    def __init__(self, dataset: str, params: Mapping[str, object], key: str) -> None:
        self._dataset = dataset
        self._params = params
        # reasoning-gym seeds entry i with seed + i, so seeds must be far apart for streams to differ.
        self._seed = int(_digest(_as_json([dataset, params, key])), 16) % 2**31
        self._chunk = 0
        self._entries = self._make(0)

    def __getitem__(self, index: int) -> dict[str, object]:
        chunk, within = divmod(index, _CHUNK)
        # One chunk is kept: a stream is read from front to back, and a resumed one makes only the chunk it is in.
        if chunk != self._chunk:
            self._entries, self._chunk = self._make(chunk), chunk
        try:
            entry: dict[str, object] = self._entries[within]  # type: ignore[index]
            return entry
        except Exception as error:
            raise self._failure("cannot generate a task with", error) from error

    def _make(self, chunk: int) -> object:
        check_installed(f"the data set {self._dataset!r}", "reasoning_gym", "reasoning-gym")
        import reasoning_gym

        _check_names(self._dataset, self._params)
        try:
            return reasoning_gym.create_dataset(
                self._dataset, seed=self._seed + chunk * _CHUNK, size=_CHUNK, **self._params
            )
        except Exception as error:  # reasoning-gym checks with asserts, and wrong types can raise anything
            raise self._failure("refuses", error) from error

    def _failure(self, problem: str, error: Exception) -> TaskError:
        return TaskError(
            f"data set {self._dataset!r} {problem} {dict(self._params)}: {type(error).__name__}: {error}",
            hint="change its parameters",
        )


def has_dataset(name: str) -> bool:
    """Return True if reasoning-gym has a data set of that name, and is installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        return False

    return name in DATASETS


def _check_names(dataset: str, params: Mapping[str, object]) -> None:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise TaskError(f"no data set named {dataset!r}", hint=suggest(dataset, DATASETS, "choose one of"))
    param_names = [field.name for field in dataclasses.fields(DATASETS[dataset][1]) if field.name not in _SET_HERE]
    unknown = [param for param in params if param not in param_names]
    if unknown:
        raise TaskError(
            f"data set {dataset!r} has no parameter {', '.join(map(repr, unknown))}",
            hint=suggest(unknown[0], param_names, "its options are"),
        )


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    """Return 64 bits of SHA-256 as 16 hex digits, the same in every process, unlike hash()."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
