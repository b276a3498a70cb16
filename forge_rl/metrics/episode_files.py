"""Files of whole episodes: one row of a Parquet file for each, with its messages, tokens, scores and logprobs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from forge_rl.types import Episode, Task, Turn

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["trained", "evaluated", "failed"]
KINDS: tuple[Kind, ...] = ("trained", "evaluated", "failed")
SCALARS = (
    *("step", "kind", "set", "group", "index", "version", "source", "task", "outcome", "problem", "seconds"),
    *("began", "reward", "advantage", "tokens", "turn_count", "answer", "asked", "said"),
)
"""Columns with one value for each episode, which list episodes without reading their tokens."""
_ASKED, _SAID = 80, 40
"""Characters of a question and of a result that lists show."""
_GROUP_TOKENS = 1 << 18
"""Tokens of a row group, which is read as a whole."""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """An episode and what the run recorded about it. Arrays have an entry for each of the T tokens that the model
    generated, turn by turn.

    RecordedEpisode(step=3, kind="trained", group=0, index=1, episode=episode, advantages=np.full(40, 0.5))
    """

    step: int
    """Step that trained on it, during which it failed, or whose weights were evaluated."""
    kind: Kind
    set: str = ""
    """Name of the evaluation set; "" if it was not evaluated."""
    group: int = -1
    """Index of its group in the batch, or of its task in the set; -1 if it failed."""
    index: int = 0
    """Index of the episode in its group."""
    version: int = -1
    """Latest version when its batch was delivered; -1 if it was not trained on."""
    episode: Episode
    advantages: npt.NDArray[np.float32] | None = None
    """[T], 0 where the loss did not see the token; None if unknown."""
    trainer_gaps: npt.NDArray[np.float32] | None = None
    """[T], the trainer's logprob just before the token's first update, minus the engine's, which is 0 for given
    tokens; NaN where the loss did not see the token; None if unknown."""
    entropies: npt.NDArray[np.float32] | None = None
    """[T], nats, entropy of the trainer's distribution of the token just before its first update; NaN where the loss
    did not see the token; None if unknown."""
    trained: npt.NDArray[np.bool_] | None = None
    """[T], True where the loss saw the token; None if it saw none."""

    @property
    def given_answer(self) -> str:
        """Which given answer it is: "chosen" or "rejected" of a pair, "given" of others; "" if a model sampled it."""
        versions = [turn.versions for turn in self.episode.turns if len(turn.versions)]
        # Versions are -1 where no model sampled; see `Turn.versions`.
        if not versions or any(of_turn.max() >= 0 for of_turn in versions):
            return ""
        pair = ("chosen", "rejected")
        is_of_pair = self.episode.task.truth.keys() >= {*pair} and 0 <= self.index < len(pair)
        return pair[self.index] if is_of_pair else "given"

    def scores_of(
        self, turn: Turn, tokens: slice
    ) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None]:
        """Return the logprobs of a turn and the trainer's gaps to them; `tokens` are the turn's place among all T.

        No engine scored given tokens: theirs are the trainer's logprobs, if known, and no gaps.
        """
        gaps = None if self.trainer_gaps is None else self.trainer_gaps[tokens]
        is_given = len(turn.versions) > 0 and bool((turn.versions < 0).all())
        return (gaps, None) if is_given else (turn.logprobs, gaps)


def write_episodes(path: Path, records: Iterable[RecordedEpisode]) -> int:
    """Write a file of episodes, atomically; returns its size in bytes.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    import pyarrow.parquet as pq

    partial, schema = path.with_name(f".{path.name}.partial"), episode_schema()
    try:
        with pq.ParquetWriter(
            partial,
            schema,
            compression="zstd",
            use_dictionary=[*_REPEATED],
            column_encoding=dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"),
            write_page_checksum=True,
            write_statistics=False,  # would copy the longest texts into the footer
        ) as writer:
            for group in _in_groups(records):
                writer.write_table(_table(group, schema), row_group_size=len(group))
        size = partial.stat().st_size
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


_REPEATED = (
    *("kind", "set", "source", "task", "outcome", "truth", "task_messages", "tools"),
    *(f"{name}.list.element" for name in ("versions", "advantages", "values", "trained")),
)
"""Columns whose values repeat, which are stored as indices."""
_NUMBERS = (
    "context_ids.list.element.list.element",
    *(f"{name}.list.element" for name in ("logprobs", "trainer_gaps", "entropies")),
)
"""Columns of numbers that are stored byte by byte, the first byte of all values first: high bytes often repeat."""


def episode_schema() -> pa.Schema:
    """Return the columns of a file of episodes."""
    import pyarrow as pa

    text, count, real = pa.string(), pa.int32(), pa.float64()
    call = {"id": text, "name": text, "arguments": text, "seconds": real, "error": text}
    turn = {
        "segment": count,
        "start": count,
        "tokens": count,
        "agent": text,
        "branch": text,
        "truncated": pa.bool_(),
        "seconds": real,
        "response_s": real,
        "value": real,
        "messages": text,
        "text": text,
        "calls": pa.list_(pa.struct(list(call.items()))),
    }
    columns = {
        "step": count,
        "kind": text,
        "set": text,
        "group": count,
        "index": count,
        "version": count,
        "source": text,
        "task": text,
        "verifier": text,
        "task_messages": text,
        "tools": text,
        "truth": text,
        "outcome": text,
        "problem": text,
        "output": text,
        "seconds": real,
        "began": real,
        "reward": real,
        "parts": pa.map_(text, real),
        "answer": text,
        "feedback": text,
        "asked": text,
        "said": text,
        "turns_in_total": pa.bool_(),
        "advantage": real,
        "tokens": count,
        "turn_count": count,
        "turns": pa.list_(pa.struct(list(turn.items()))),
        # For each segment its whole context once; turns refer to it by start and length.
        "context_ids": pa.list_(pa.list_(count)),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(count),
        "trained": pa.list_(pa.bool_()),
        "trainer_gaps": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
        "advantages": pa.list_(pa.float32()),
        "values": pa.list_(pa.float32()),
    }
    return pa.schema(list(columns.items()), metadata={"forge_rl": "1"})


def _in_groups(records: Iterable[RecordedEpisode]) -> Iterator[list[RecordedEpisode]]:
    """Gather records for row groups."""
    group, tokens = list[RecordedEpisode](), 0
    for record in records:
        group.append(record)
        # The last turn of a run has the run's whole context: prompt_ids is everything before its own tokens.
        last_turns = [record.episode.turns[run[-1]] for run in record.episode.runs]
        tokens += 1 + sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in last_turns)
        if tokens >= _GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _table(records: Sequence[RecordedEpisode], schema: pa.Schema) -> pa.Table:
    """Convert records to columns."""
    # A long function, as it has an entry for each column of the file.
    import pyarrow as pa

    json_by_id: dict[int, str] = {}
    """JSON by the identity of the object, as the episodes of a group share objects."""

    def as_json(value: object) -> str:
        if id(value) not in json_by_id:
            json_by_id[id(value)] = _json(value)
        return json_by_id[id(value)]

    episodes = [record.episode for record in records]
    turns = [turn for episode in episodes for turn in _turns(episode, as_json)]
    # Arrays of all turns of all episodes are joined; these lengths cut them into one list for each episode.
    generated = [episode.response_tokens for episode in episodes]
    contexts = [episode.turns[run[-1]] for episode in episodes for run in episode.runs]
    values = [[np.asarray(scores, np.float32) for scores in e.score.tokens] if e.score else [] for e in episodes]
    columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in SCALARS[:2]}
    columns |= {name: [getattr(record, name) for record in records] for name in ("set", "group", "index", "version")}
    columns |= {
        "source": [episode.task.source for episode in episodes],
        "task": [episode.task.id for episode in episodes],
        "verifier": [episode.task.verifier for episode in episodes],
        "task_messages": [as_json(episode.task.messages) for episode in episodes],
        "tools": [as_json(episode.task.tools) for episode in episodes],
        "truth": [as_json(episode.task.truth) for episode in episodes],
        "outcome": [episode.outcome.value for episode in episodes],
        "problem": [episode.problem for episode in episodes],
        "output": [episode.output for episode in episodes],
        "seconds": [None if record.given_answer else record.episode.seconds for record in records],
        "began": [episode.began or None for episode in episodes],
        "reward": [episode.score.total if episode.score else None for episode in episodes],
        "parts": [
            [(_encodable(name), float(value)) for name, value in episode.score.parts.items()] if episode.score else []
            for episode in episodes
        ],
        "answer": [episode.score.answer if episode.score else "" for episode in episodes],
        "feedback": [_encodable(episode.score.feedback) if episode.score else "" for episode in episodes],
        "asked": [_asked(episode.task) for episode in episodes],
        "said": [_last_words(record.episode.text, record.given_answer) for record in records],
        "turns_in_total": [episode.score is not None and episode.score.turns_in_total for episode in episodes],
        "advantage": [_mean(record.advantages, record.trained) for record in records],
        "tokens": generated,
        "turn_count": [len(episode.turns) for episode in episodes],
        "turns": _lists(
            pa.StructArray.from_arrays(
                [
                    _array([turn[column.name] for turn in turns], column.type)
                    for column in schema.field("turns").type.value_type
                ],
                fields=list(schema.field("turns").type.value_type),
            ),
            [len(episode.turns) for episode in episodes],
        ),
        # Two levels: the segments of each episode, and the tokens of each segment.
        "context_ids": _lists(
            _lists(
                _numbers([ids for turn in contexts for ids in (turn.prompt_ids, turn.token_ids)], np.int32),
                [len(turn.prompt_ids) + len(turn.token_ids) for turn in contexts],
            ),
            [len(episode.runs) for episode in episodes],
        ),
        "logprobs": _lists(_numbers([t.logprobs for e in episodes for t in e.turns], np.float32), generated),
        "versions": _lists(_numbers([t.versions for e in episodes for t in e.turns], np.int32), generated),
        "trained": _number_lists([record.trained for record in records], np.bool_),
        "trainer_gaps": _number_lists([record.trainer_gaps for record in records], np.float32),
        "entropies": _number_lists([record.entropies for record in records], np.float32),
        "advantages": _number_lists([record.advantages for record in records], np.float32),
        "values": _lists(
            _rounded(_numbers([array for arrays in values for array in arrays], np.float32)),
            [sum(map(len, arrays)) for arrays in values],
        ),
    }
    return pa.table([_array(columns[column.name], column.type) for column in schema], schema=schema)


def _turns(episode: Episode, as_json: Callable[[object], str]) -> Iterator[dict[str, object]]:
    """Describe an episode's turns; the tokens of each lie in a segment."""
    segments = {turn: segment for segment, run in enumerate(episode.runs) for turn in run}
    values = episode.score.turns if episode.score is not None else ()
    for place, turn in enumerate(episode.turns):
        yield {
            "segment": segments[place],
            # Where the turn's own tokens begin in its segment.
            "start": len(turn.prompt_ids),
            "tokens": len(turn.token_ids),
            "agent": _encodable(turn.agent),
            "branch": ".".join(map(str, turn.branch)),
            "truncated": turn.truncated,
            "seconds": turn.seconds,
            "response_s": turn.response_s,
            "value": float(values[place]) if place < len(values) else None,
            "messages": as_json(turn.messages),
            "text": turn.text,
            "calls": [
                {
                    "id": _encodable(call.id),
                    "name": _encodable(call.name),
                    "arguments": _encodable(call.arguments),
                    "seconds": call.seconds,
                    "error": _encodable(call.error),
                }
                for call in turn.calls
            ],
        }


def _array(values: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if not isinstance(values, list):
        return values
    # Lone surrogates are rare, so texts are escaped one by one only if the whole column fails.
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([value if value is None else _encodable(value) for value in values], kind)


def _lists(values: Any, lengths: Sequence[int]) -> Any:
    """Make an array of lists from their concatenated values and their lengths."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), pa.array(values))


def _number_lists(arrays: Sequence[npt.NDArray[Any] | None], dtype: type[np.generic]) -> Any:
    """Make an array of lists of numbers, rounded if they are real; None becomes an empty list."""
    numbers = _numbers([array for array in arrays if array is not None], dtype)
    lengths = [0 if array is None else len(array) for array in arrays]
    return _lists(_rounded(numbers) if dtype is np.float32 else numbers, lengths)


def _numbers(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Join arrays to a new one."""
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round in place to 8 significant bits, an error of at most 0.4%, so that half of each number's bytes are zero."""
    # The low halves of the numbers, on little-endian machines: all zero if they have been rounded already.
    if values.view(np.uint16)[::2].any():
        # One NaN for all: rounding up the bits of another could overflow.
        bits = np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)
        # Half to even in integers: add just under half of the last bit kept, plus that bit, then cut the rest.
        np.bitwise_and(bits + (0x7FFF + ((bits >> 16) & 1)), 0xFFFF0000, out=values.view(np.uint32))
    return values


def _mean(values: npt.NDArray[np.float32] | None, trained: npt.NDArray[np.bool_] | None) -> float | None:
    if values is None or not len(values):
        return None
    trained_values = values[trained] if trained is not None and trained.any() else values
    return float(trained_values.mean(dtype=np.float64))


def _asked(task: Task) -> str:
    """Return the first words of a task's last message, on one line."""
    content = task.messages[-1].get("content") if task.messages else ""
    words = " ".join(content[: 4 * _ASKED].split()) if isinstance(content, str) else ""
    return words if len(words) <= _ASKED else f"{words[: _ASKED - 1]}…"


def _last_words(text: str, given_answer: str) -> str:
    """Return the last words of a text, on one line, after the kind of a given answer."""
    start = f"{given_answer}: " if given_answer else ""
    words, room = " ".join(text[-4 * _SAID :].split()), _SAID - len(start)
    return start + (words if len(words) <= room else f"…{words[1 - room :]}")


def _json(value: object) -> str:
    """Write JSON; an object without a JSON form, which a task's truth may hold, becomes its repr."""
    # json writes dicts only, not other mappings.
    if isinstance(value, Mapping):
        value = dict(value)
    return json.dumps(value, ensure_ascii=False, default=repr)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which a model can produce and UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
