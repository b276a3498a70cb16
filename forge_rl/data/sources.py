"""Sources: resumable streams of tasks, each with a held-out part that is never trained on."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_rl.errors import TaskError
from forge_rl.types import Message, Task

_CHUNK = 500
"""Tasks of one reasoning-gym data set; some generate all of theirs when they are made, so a stream is many of them."""
_OURS = ("seed", "size")
"""Fields of every reasoning-gym config that a source sets itself."""


class Source(Protocol):
    """A resumable stream of tasks, the same for the same seed."""

    @property
    def name(self) -> str:
        """Says in logs and in the mixture where a task came from."""

    def draw(self) -> Task:
        """The next task to train on; never one that is held out."""

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """The first `tasks` held-out tasks, with distinct questions and the same for every seed; fewer if there are."""

    def state(self) -> dict[str, object]:
        """Where the stream stands, as JSON."""

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from where a stream stood."""


class ReasoningGymSource:
    """Procedural tasks of a reasoning-gym data set, generated one by one and without end.

    Whether a question is held out depends on a hash of its text alone: not on the seed, nor on the parameters that
    generated it. So scores of runs with different seeds compare, and no held-out question is ever trained on.

    Args:
        dataset: name in reasoning-gym, such as "chain_sum".
        params: fields of the data set's config.
        seed: of the training stream.
        held_out_share: share of all distinct questions that is held out, from 0 up to less than 1.
        name: of the source, by default that of the data set.
        instruction: text put behind each question, such as " Answer with a number."
        system: text of a system message, or "" for none.

    Raises:
        TaskError: unknown data set or parameter, or a value that it refuses.
    """

    def __init__(
        self,
        dataset: str,
        params: Mapping[str, object],
        seed: int,
        held_out_share: float,
        *,
        name: str = "",
        instruction: str = "",
        system: str = "",
    ) -> None:
        if not 0 <= held_out_share < 1:
            raise TaskError(
                f"held_out_share is {held_out_share}", hint="choose a share from 0 up to less than 1, such as 0.1"
            )
        self.dataset = dataset
        self.params = dict(params)
        self.seed = seed
        self.held_out_share = held_out_share
        self.instruction = instruction
        self.system = system
        self._name = name or dataset
        self._drawn = _Stream(dataset, self.params, f"seed {seed}")
        self._index = 0

    @property
    def name(self) -> str:
        """Says in logs and in the mixture where a task came from."""
        return self._name

    def __repr__(self) -> str:
        params = ", ".join(f"{key}={value!r}" for key, value in self.params.items())
        return f"{self.dataset}({params}) seed {self.seed}, {self._index} generated"

    def draw(self) -> Task:
        """The next task to train on.

        Raises:
            TaskError: all questions are held out, or the data set fails with these parameters.
        """
        for _ in range(math.ceil(200 / (1 - self.held_out_share))):
            entry = self._drawn[self._index]
            self._index += 1
            if not self._is_held_out(entry):
                return self._task(entry)
        raise TaskError(
            f"{self._described()} has so few questions that all are held out",
            hint="choose parameters that give more questions, or a smaller held-out share",
        )

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        """The first `tasks` held-out tasks, with distinct questions and the same for every seed.

        Fewer when the data set has fewer. Generates about tasks / held_out_share tasks, which takes long for the few
        data sets that are slow.

        Raises:
            TaskError: there is not one, or the data set fails with these parameters.
        """
        if tasks > 0 and self.held_out_share == 0:
            raise TaskError(f"nothing of {self._described()} is held out", hint="set a held-out share above 0")
        stream = _Stream(self.dataset, self.params, "held out")
        found: dict[str, Task] = {}
        index = last_new = 0
        while len(found) < tasks and index - last_new < 200 / self.held_out_share:
            entry = stream[index]
            index += 1
            if self._is_held_out(entry) and entry["question"] not in found:
                found[str(entry["question"])] = self._task(entry)
                last_new = index
        if tasks > 0 and not found:
            raise TaskError(
                f"{self._described()} has so few questions that none is held out",
                hint="choose parameters that give more questions, or a greater held-out share",
            )
        return tuple(found.values())

    def state(self) -> dict[str, object]:
        """Where the stream stands, as JSON."""
        return {"dataset": self.dataset, "params": self.params, "seed": self.seed, "index": self._index}

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from where a stream stood.

        Raises:
            TaskError: the state is that of another stream.
        """
        same = ("dataset", "params", "seed")
        ours = json.loads(json.dumps({key: value for key, value in self.state().items() if key in same}))
        theirs = json.loads(json.dumps({key: state.get(key) for key in same}))
        index = state.get("index")
        if ours != theirs or not isinstance(index, int):
            raise TaskError(
                f"the saved state of source {self._name!r} is of another stream: {theirs}, not {ours}",
                hint="resume with the tasks and the seed of the first start, or start a new run",
            )
        self._index = index

    def _is_held_out(self, entry: Mapping[str, object]) -> bool:
        return int(_digest(str(entry["question"])), 16) < self.held_out_share * 2**64

    def _task(self, entry: dict[str, object]) -> Task:
        question = str(entry["question"])
        messages: tuple[Message, ...] = ({"role": "user", "content": question + self.instruction},)
        if self.system:
            messages = ({"role": "system", "content": self.system}, *messages)
        return Task(
            id=f"{self.dataset}/{_digest(question)}",
            source=self._name,
            messages=messages,
            truth={"dataset": self.dataset, "params": self.params, "entry": entry},
        )

    def _described(self) -> str:
        return f"data set {self.dataset!r} with {self.params} and held_out_share {self.held_out_share}"


class _Stream:
    """The entries of a data set by index, without end, in an order that `key` chooses."""

    def __init__(self, dataset: str, params: Mapping[str, object], key: str) -> None:
        described = json.dumps([dataset, params, key], sort_keys=True, default=str)
        self._dataset = dataset
        self._params = params
        # reasoning-gym seeds entry i with seed + i, so seeds must lie far apart for streams to differ.
        self._seed = int(_digest(described), 16) % 2**31
        self._chunk = 0
        self._entries = self._make(0)

    def __getitem__(self, index: int) -> dict[str, object]:
        chunk, within = divmod(index, _CHUNK)
        if chunk != self._chunk:
            self._entries, self._chunk = self._make(chunk), chunk
        try:
            return self._entries[within]  # type: ignore[index]
        except Exception as error:
            raise TaskError(
                f"data set {self._dataset!r} cannot generate a task with {dict(self._params)}: "
                f"{type(error).__name__}: {error}",
                hint="change its parameters",
            ) from error

    def _make(self, chunk: int) -> object:
        return _make_dataset(self._dataset, self._params, seed=self._seed + chunk * _CHUNK)


def _digest(text: str) -> str:
    """64 bits of SHA-256, as 16 hex digits: the same in every process, unlike hash()."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make_dataset(dataset: str, params: Mapping[str, object], *, seed: int) -> object:
    import reasoning_gym

    _check_params(dataset, params)
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **params)
    except Exception as error:  # checks in reasoning-gym are asserts, and wrong types fail anyhow
        raise TaskError(
            f"data set {dataset!r} refuses {dict(params)}: {type(error).__name__}: {error}",
            hint="change its parameters",
        ) from error


def _check_params(dataset: str, params: Mapping[str, object]) -> None:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(sorted(DATASETS))}"
        raise TaskError(f"no data set named {dataset!r}", hint=hint)
    allowed = [field.name for field in dataclasses.fields(DATASETS[dataset][1]) if field.name not in _OURS]
    unknown = [param for param in params if param not in allowed]
    if unknown:
        raise TaskError(
            f"data set {dataset!r} has no parameter {', '.join(map(repr, unknown))}",
            hint=f"it has: {', '.join(allowed)}",
        )


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """What `parse_source` reads: a data set, its parameters, and its weight in a mixture."""

    name: str
    params: Mapping[str, object] = dataclasses.field(default_factory=dict)
    weight: float = 1.0

    @property
    def label(self) -> str:
        """Name and parameters: tells specs of the same data set apart."""
        params = ",".join(f"{key}={_written(value)}" for key, value in self.params.items())
        return f"{self.name}:{params}" if params else self.name


def parse_source(text: str) -> SourceSpec:
    """Read `name[:key=value,...][*weight]`, such as `chain_sum:min_terms=2,max_digits=1*0.5`.

    Values are numbers, true, false, none, lists such as [+,-] or ["+","-"], and else text. The weight is 1 by default.

    Raises:
        TaskError: the text does not read so, or names an unknown data set or parameter, or a value is refused.
    """
    described, weight = _split_weight(text)
    name, _, listed = described.partition(":")
    params: dict[str, object] = {}
    for part in _split_commas(listed):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise TaskError(f"cannot read {part!r} in the tasks {text!r}", hint="write name:key=value,key=value*weight")
        params[key.strip()] = _value(value.strip())
    spec = SourceSpec(name=name.strip(), params=params, weight=weight)
    _make_dataset(spec.name, spec.params, seed=0)
    return spec


def make_sources(
    specs: Sequence[SourceSpec], seed: int, held_out_share: float, *, instruction: str = "", system: str = ""
) -> dict[str, Source]:
    """Sources by name, in the order of the specs; specs of the same data set are named by their parameters too.

    Raises:
        TaskError: the same spec twice, or what ReasoningGymSource raises.
    """
    datasets = [spec.name for spec in specs]
    sources: dict[str, Source] = {}
    for spec in specs:
        name = spec.name if datasets.count(spec.name) == 1 else spec.label
        if name in sources:
            raise TaskError(f"the tasks {name!r} are named twice", hint="name them once, with the sum of the weights")
        sources[name] = ReasoningGymSource(
            spec.name, spec.params, seed, held_out_share, name=name, instruction=instruction, system=system
        )
    return sources


def _split_weight(text: str) -> tuple[str, float]:
    # An operator may be a star too, but then inside brackets.
    match = re.fullmatch(r"(.*)\*([^*\]]*)", text, flags=re.DOTALL)
    if match is None:
        return text, 1.0
    try:
        weight = float(match[2])
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise TaskError(
            f"the weight {match[2]!r} of the tasks {text!r} is not a number from 0 up",
            hint="write name:key=value,key=value*weight, with a weight such as 0.5",
        )
    return match[1], weight


def _split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def _value(text: str) -> object:
    readers: tuple[Callable[[str], object], ...] = (json.loads, ast.literal_eval)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in readers:
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip()) for part in _split_commas(text[1:-1])]
    return text


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
