"""Reads files of episodes.

What a file holds may come from another machine: it is checked, and nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ForgeError
from forge_rl.metrics.episode_files import KINDS, SCALARS, RecordedEpisode, episode_schema
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, ToolCall, Turn

if TYPE_CHECKING:
    import pyarrow as pa

_ALWAYS = frozenset(SCALARS) - {"seconds", "began", "reward", "advantage"}
"""Columns of which a run leaves no value out."""
_MOST_ROWS = 1 << 20
_MOST_GROUP_BYTES = 1 << 30
"""Maximum decompressed size of a row group that is read."""


class EpisodeFile:
    """A file of episodes, read a row group at a time.

        file = EpisodeFile(Path("runs/grpo-1/episodes/000012-trained.parquet"))
        file.listing()[0]["reward"], file[0].episode

    Raises:
        ForgeError: it cannot be read, is not such a file, or is larger than anything that a run writes.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            schema, metadata = self._file.schema_arrow, self._file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._broken(str(error)) from error
        expected = episode_schema()
        if "feedback" not in schema.names:  # of a run before it was kept
            expected = expected.remove(expected.get_field_index("feedback"))
        if not schema.equals(expected):
            raise self._broken("it has other columns than a file of episodes")
        if metadata.num_rows > _MOST_ROWS or any(group.total_byte_size > _MOST_GROUP_BYTES for group in groups):
            raise self._broken("it is larger than any that a run writes")
        self._starts = [0, *np.cumsum([group.num_rows for group in groups]).tolist()]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def listing(self) -> list[dict[str, Any]]:
        """Return the `SCALARS` of each episode, and its place in this file as "row"."""
        rows: list[dict[str, Any]] = []
        for group in range(len(self._starts) - 1):
            rows += self._read(group, list(SCALARS))
        return [{"row": place, **row} for place, row in enumerate(rows)]

    def columns(self) -> dict[str, list[Any]]:
        """Return the `SCALARS` of all episodes, by column."""
        columns: dict[str, list[Any]] = {name: [] for name in SCALARS}
        for group in range(len(self._starts) - 1):
            table = self._read_table(group, list(SCALARS))
            for name in SCALARS:
                columns[name] += table[name].to_pylist()
        return columns

    def __getitem__(self, row: int) -> RecordedEpisode:
        if not 0 <= row < len(self):
            raise IndexError(row)
        # The last row group that begins at or before the row.
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        return self._record(self._read(group, None, row - self._starts[group])[0])

    def __iter__(self) -> Iterator[RecordedEpisode]:
        for group in range(len(self._starts) - 1):
            yield from map(self._record, self._read(group, None))

    def batch(self) -> Batch:
        """Return the batch of a file that holds a whole one."""
        groups: dict[int, list[Episode]] = {}
        version = -1
        for record in self:
            groups.setdefault(record.group, []).append(record.episode)
            version = record.version
        batch_groups = (
            Group(task=episodes[0].task, episodes=tuple(episodes)) for _, episodes in sorted(groups.items())
        )
        return Batch(groups=tuple(batch_groups), version=version)

    def _read_table(self, group: int, columns: list[str] | None) -> pa.Table:
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            table = self._file.read_row_group(group, columns=columns)
            # The file may be hostile: offsets and texts are checked in full before anything follows them.
            table.validate(full=True)
            if len(table) != self._starts[group + 1] - self._starts[group]:
                raise ValueError("a row group has another number of rows than it says")
            for name in _ALWAYS.intersection(table.column_names):
                if table[name].null_count:
                    raise ValueError(f"an episode has no {name}")
            # NaN has no place in an order of rewards, and no scorer gives it.
            if "reward" in table.column_names and pc.any(pc.is_nan(table["reward"])).as_py():
                raise ValueError("a reward is not a number")
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            raise self._broken(str(error)) from error
        return table

    def _read(self, group: int, columns: list[str] | None, row: int | None = None) -> list[dict[str, Any]]:
        import pyarrow as pa

        table = self._read_table(group, columns)
        try:
            table = table if row is None else table.slice(row, 1)
            array_names = [column.name for column in table.schema if columns is None and column.name in _ARRAYS]
            # Columns of numbers stay arrays, without a Python object for each number.
            rows: list[dict[str, Any]] = table.drop_columns(array_names).to_pylist()
            for name in array_names:
                for place, values in enumerate(table[name]):
                    rows[place][name] = _values(values)
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            raise self._broken(str(error)) from error
        return rows

    def _record(self, row: Mapping[str, Any]) -> RecordedEpisode:
        try:
            return _record(row)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RecursionError) as error:
            raise self._broken(f"{type(error).__name__}: {error}") from error

    def _broken(self, cause: str) -> ForgeError:
        first_line = (cause.splitlines() or [""])[0]
        return ForgeError(
            f"{self.path} cannot be read: {first_line:.200}", hint="it is damaged, or not a file of episodes"
        )


_OPTIONAL = ("trained", "trainer_gaps", "entropies", "advantages", "values")
_ARRAYS = ("context_ids", "logprobs", "versions", *_OPTIONAL)
"""Columns that are read as arrays."""


def _values(values: Any) -> Any:
    """Return a list as an array, or a list of lists as arrays.

    Raises:
        ValueError: it is null, or holds a null.
    """
    inner = values.values
    # Null numbers would become NaN, and null lists None.
    _check(inner is not None and not inner.null_count, "an array is null")
    if hasattr(inner, "offsets"):
        return [_values(element) for element in inner]
    return inner.to_numpy(zero_copy_only=False)


def _record(row: Mapping[str, Any]) -> RecordedEpisode:
    """Make a record from a row, whose parts may contradict each other."""
    task = Task(
        id=row["task"],
        source=row["source"],
        messages=tuple(_objects(row["task_messages"])),
        truth=dict(json.loads(row["truth"])),
        tools=tuple(_objects(row["tools"])),
        verifier=row["verifier"],
    )
    counts = [turn["tokens"] for turn in row["turns"]]
    # [turns + 1]: the tokens of turn i are at ends[i] to ends[i + 1] of each array.
    ends = np.cumsum([0, *counts])
    _check(min(counts, default=0) >= 0, "a turn has a negative number of tokens")
    total = int(ends[-1])
    for name in ("logprobs", "versions"):
        _check(len(row[name]) == total, f"{name} do not fit the turns")
    # An empty list stands for an unknown array; see `_number_lists`.
    optional = {name: row[name] if len(row[name]) else None for name in _OPTIONAL}
    for name, values in optional.items():
        _check(values is None or len(values) == total, f"{name} do not fit the turns")
    score = None
    if row["reward"] is not None:
        # Either all turns have a score or none has.
        by_turn = [turn["value"] for turn in row["turns"]]
        values = optional["values"]
        score = Score(
            total=row["reward"],
            parts=dict(row["parts"]),
            turns=() if None in by_turn else tuple(by_turn),
            turns_in_total=row["turns_in_total"],
            tokens=() if values is None else tuple(np.split(values, ends[1:-1])),
            answer=row["answer"],
            feedback=row.get("feedback", ""),
        )
    _check(row["kind"] in KINDS, "it is of no known kind")
    return RecordedEpisode(
        **{name: row[name] for name in ("step", "kind", "set", "group", "index", "version")},
        episode=Episode(
            task=task,
            turns=tuple(_read_turns(row, ends)),
            score=score,
            output=row["output"],
            outcome=Outcome(row["outcome"]),
            problem=row["problem"],
            seconds=row["seconds"] or 0.0,
            began=row["began"] or 0.0,
        ),
        advantages=optional["advantages"],
        trainer_gaps=optional["trainer_gaps"],
        entropies=optional["entropies"],
        trained=optional["trained"],
    )


def _read_turns(row: Mapping[str, Any], ends: npt.NDArray[Any]) -> Iterator[Turn]:
    """Yield the turns of a row; `ends`, [turns + 1], holds the ends of their tokens, after a 0."""
    for turn, first, end in zip(row["turns"], ends[:-1], ends[1:], strict=True):
        _check(0 <= turn["segment"] < len(row["context_ids"]), "a turn has no segment")
        context, start = row["context_ids"][turn["segment"]], turn["start"]
        _check(0 <= start <= start + turn["tokens"] <= len(context), "a turn does not fit its segment")
        yield Turn(
            prompt_ids=context[:start],
            token_ids=context[start : start + turn["tokens"]],
            logprobs=row["logprobs"][first:end],
            versions=row["versions"][first:end],
            text=turn["text"],
            agent=turn["agent"],
            branch=tuple(map(int, turn["branch"].split("."))) if turn["branch"] else (),
            truncated=turn["truncated"],
            messages=tuple(_objects(turn["messages"])),
            calls=tuple(ToolCall(**call) for call in turn["calls"]),
            seconds=turn["seconds"],
            response_s=turn["response_s"],
        )


def _objects(text: str) -> list[dict[str, Any]]:
    """Read a list of JSON objects."""
    objects = json.loads(text)
    _check(
        isinstance(objects, list) and all(isinstance(entry, dict) for entry in objects), "it holds no list of objects"
    )
    return list(objects)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
