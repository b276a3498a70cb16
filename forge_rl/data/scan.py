"""Scans files before a run: bad rows, overlong tasks, duplicates, overlap with evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_rl.data.mixture import Mixture
from forge_rl.data.sources.iterable import IterableSource
from forge_rl.data.sources.reasoning_gym import ReasoningGymSource
from forge_rl.data.sources.table_source import ReadRow, TableSource
from forge_rl.errors import ForgeError, ModelError, TaskError
from forge_rl.models.cache import Progress
from forge_rl.models.hf_folder import tokenizer_files
from forge_rl.system.folders import make_private
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task

# Part of the cache's key: raise it when a scan finds other things in the same files.
_VERSION = 5
_ROWS_AT_ONCE = 1000
_MEASURED = 200
"""Rows of a source to render before a run, to find what the chat template refuses or leaves out."""
_LOOKED_AT = 999
"""Rows to read after the first bad one, to say how many are bad."""
_BIG_BYTES = 1 << 25
"""Minimum total size of files for which progress is shown."""
_CACHED_BYTES = 1 << 22
"""Minimum total size of files for which the findings are cached."""
_MAX_COMPARED = 100_000
"""Items of a source made by code that are compared with the evaluation sets before a run."""
_MESSAGE_TOKENS = 32
"""Maximum tokens that a chat template adds around a message."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Findings of a scan of a source's files."""

    rows: int
    """Number of rows, bad ones included."""
    held_out: int = 0
    """Number of held-out rows."""
    bad: int = 0
    """Number of rows that yield no task."""
    example: str = ""
    """The first bad row: file, line, column and value."""
    duplicates: int = 0
    """Number of rows whose problem occurred before."""
    with_tools: int = 0
    """Number of usable rows that bring tools for the model."""
    too_long: tuple[int, ...] = ()
    """Rows that are too long, such as prompts that leave no room for an answer; see `ReadRow.row`."""
    overlap: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Training rows whose problem is also in an evaluation set, by set name."""
    note: str = ""
    """What the rendered rows have in common; see `Lengths.take_note`."""

    @property
    def trained(self) -> int:
        """Number of rows trained on per epoch."""
        return self.rows - self.held_out - self.bad - len(self.too_long) - len(set().union(*self.overlap.values()))

    def describe(self, limit: int, measured: str = "their prompts") -> str:
        """Summarise the findings in one line; `limit` is the limit of the `measured` text, in tokens."""
        parts = [f"{self.rows:,} rows"]
        parts += [f"{self.held_out:,} held out"] if self.held_out else []
        if self.too_long:
            parts.append(f"{len(self.too_long):,} left out, as {measured} are longer than {limit:,} tokens")
        if self.bad:
            parts.append(f"{self.bad:,} bad rows skipped, the first: {self.example}")
        if self.duplicates:
            parts.append(f"{self.duplicates:,} duplicates")
        if self.note:
            parts.append(self.note)
        return "; ".join(parts)


class Lengths(Protocol):
    """Measures tasks against a limit."""

    limit: int
    """Maximum tokens."""
    measured: str
    """What is limited, in words."""
    hint: str
    """Advice for a user whose tasks are all too long."""

    def too_long(self, task: Task) -> bool:
        """Return whether a task exceeds the limit.

        Raises:
            ModelError: the chat template refuses the task.
            TaskError: the task cannot be used.
        """

    def length(self, task: Task) -> int:
        """Return the number of tokens that are limited; errors as in `too_long`."""

    def take_note(self) -> str:
        """Return what the user should know of the tasks measured since the last call, or ""."""

    def digest(self) -> str:
        """Return a digest of everything that the lengths depend on."""


def check_tasks(
    mixture: Mixture,
    make_lengths: Callable[[], Lengths],
    *,
    cache: Path,
    progress: Progress = lambda label, fraction: None,
) -> dict[str, Scan]:
    """Read all files of a mixture once and leave out unusable rows; return the findings by source.

        scans = check_tasks(mixture, lambda: PromptLengths(Tokenizer(model), 1008), cache=default_cache())

    From then on, the sources and evaluation sets leave out overlong tasks. Of sources made by code, only the first
    100,000 items are compared with the evaluation sets; later ones are left out as they come. Generated tasks hold out
    their own. Findings for large files are cached.

    Args:
        make_lengths: called if there are files.
        progress: called for large files with the current step and the fraction done.

    Raises:
        TaskError: too many bad rows; the chat template refuses a row; no row is left; or evaluation problems are also
            trained on and the mixture's overlap is "refuse".
    """
    all_sources = (*mixture.sources.values(), *mixture.evaluation.values())
    has_files = any(isinstance(source, TableSource) for source in all_sources)
    lengths = make_lengths() if has_files else None
    # Evaluation sets come first: training sources are compared with the problems found in them.
    problems: dict[str, set[int]] = {}
    scans: dict[str, Scan] = {}
    for name, source in mixture.evaluation.items():
        if isinstance(source, TableSource) and lengths is not None:
            problems[name] = set()
            scan = _scan(source, lengths, problems=problems[name], progress=progress)
            source.leave_out(scan.too_long)
            scans[f"evaluation {name}"] = dataclasses.replace(scan, held_out=0)
        elif isinstance(source, IterableSource):
            problems[name] = set(source.problems(_MAX_COMPARED, held_out=True))
    for name, source in mixture.sources.items():
        if isinstance(source, IterableSource) and any(problems.values()):
            trained_problems = set(source.problems(_MAX_COMPARED, held_out=False))
            for set_name, set_problems in problems.items():
                if mixture.overlap == "refuse" and (shared_problems := trained_problems & set_problems):
                    raise _overlap(len(shared_problems), name, set_name, "")
            source.leave_out(set().union(*problems.values()))
        elif isinstance(source, TableSource) and lengths is not None:
            scan = _cached(source, lengths, problems, cache, progress)
            for set_name, rows in scan.overlap.items():
                if rows and mixture.overlap == "refuse":
                    raise _overlap(len(rows), name, set_name, f", the first is {source.describe(rows[0])}")
            if scan.trained <= 0:
                raise TaskError(
                    f"no task of {name!r} can be trained on: {scan.describe(lengths.limit, lengths.measured)}",
                    hint=lengths.hint if scan.too_long else "provide more rows, or lower --data.held-out-share",
                )
            source.leave_out([*scan.too_long, *itertools.chain(*scan.overlap.values())])
            scans[name] = scan
    return scans


def lacks_tools(mixture: Mixture, scans: Mapping[str, Scan]) -> bool:
    """Return whether a mixture is known to have no task with tools; False if a source made by code may have some.

    Args:
        scans: findings of `check_tasks`.
    """
    sources = (*mixture.sources.values(), *mixture.evaluation.values())
    is_known = all(isinstance(source, ReasoningGymSource | TableSource) for source in sources)
    return is_known and not any(scan.with_tools for scan in scans.values())


def _overlap(count: int, source: str, evaluation: str, first: str) -> TaskError:
    return TaskError(
        f"{count:,} tasks of {source!r} are also in the evaluation {evaluation!r}{first}",
        hint="remove them from one of the two, or set --data.overlap leave-out",
    )


class PromptLengths:
    """Finds overlong prompts; most need no tokenization, as no token is shorter than a byte.

    Args:
        limit: maximum tokens of a prompt.
    """

    measured = "their prompts"
    hint = "raise --generator.max-model-len, or lower --generator.max-tokens"

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        # Tokens that the template writes around a conversation, such as a default system message.
        self._frame = len(tokenizer.render([{"role": "user", "content": "x"}]))

    def too_long(self, task: Task) -> bool:
        """Return whether a task's prompt exceeds the limit.

        Raises:
            ModelError: the chat template refuses the task.
        """
        # Tokens cannot exceed bytes, so most prompts are known to fit without being rendered, which takes far longer.
        upper_bound = self._frame + _MESSAGE_TOKENS * len(task.messages) + _text_bytes(task)
        return upper_bound > self.limit and self.length(task) > self.limit

    def length(self, task: Task) -> int:
        """Return the number of tokens of a task's prompt."""
        return len(self.tokenizer.render(task.messages, tools=task.tools))

    def take_note(self) -> str:
        """Return "": prompts have nothing to tell."""
        return ""

    def digest(self) -> str:
        """Return a digest of the tokenizer and its chat template."""
        return template_digest(self.tokenizer)


def template_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of everything that rendered messages depend on."""
    hasher = hashlib.sha256(b"".join(path.read_bytes() for path in tokenizer_files(tokenizer.folder)))
    hasher.update(str(tokenizer.hf.chat_template).encode())
    if tokenizer.template_args:
        hasher.update(repr(sorted(tokenizer.template_args.items())).encode())
    return hasher.hexdigest()


def _text_bytes(task: Task) -> int:
    """Return an upper bound on a task's text in bytes; above any limit if only the template can tell."""
    total = 0
    for message in task.messages:
        content = message.get("content", "")
        # Templates write tools, calls and other fields at lengths that their own texts do not bound.
        if task.tools or len(message) > 2 or not isinstance(content, str):
            return 1 << 40
        total += len(content) if content.isascii() else len(content.encode())
    return total


def _check_bad(source: TableSource, num_bad: int, num_rows: int, example: str) -> None:
    if num_bad > source.max_bad_rows * num_rows:
        raise TaskError(
            f"{num_bad:,} of {num_rows:,} rows of {source.name!r} are bad, more than --data.max-bad-rows "
            f"{source.max_bad_rows:g}; the first: {example}",
            hint="fix them, or raise --data.max-bad-rows",
        )


def _scan(
    source: TableSource,
    lengths: Lengths,
    *,
    problems: set[int] | None = None,
    evaluation_problems: Mapping[str, set[int]] | None = None,
    progress: Progress,
) -> Scan:
    """Read all rows of a source and return the findings.

    Args:
        problems: set to which the keys of the source's problems are added.
        evaluation_problems: keys of evaluation problems by set name.
    """
    num_rows = num_held_out = num_bad = num_with_tools = 0
    example = ""
    # 8 bytes a row instead of about 40 for an integer in a list: files may have many millions of rows.
    keys = array("Q")
    too_long: list[int] = []
    overlap: dict[str, list[int]] = {name: [] for name in evaluation_problems or {}}
    reading = _read(source, progress)
    for read_row in reading:
        num_rows += 1
        if read_row.task is None:
            if source.max_bad_rows == 0:
                # Some more rows are read, so that the error says whether one row is bad or all are.
                raise source.failure(read_row, *itertools.islice(reading, _LOOKED_AT))
            num_bad += 1
            example = example or f"{source.describe(read_row.row)}: {read_row.error}"
            continue
        try:
            if len(keys) < _MEASURED:  # the template may refuse these messages, and too_long rarely renders
                is_long = lengths.length(read_row.task) > lengths.limit
            else:
                is_long = lengths.too_long(read_row.task)
        except (ModelError, TaskError) as error:
            message = f"{source.describe(read_row.row)}: {error.message}"
            # A template that refuses messages refuses all rows of that form, so it is no matter of single bad rows.
            if isinstance(error, ModelError) or source.max_bad_rows == 0:
                raise TaskError(message, hint=error.hint) from error
            num_bad += 1
            example = example or message
            continue
        keys.append(read_row.problem)
        num_with_tools += bool(read_row.task.tools)
        if problems is not None:
            problems.add(read_row.problem)
        if is_long:
            too_long.append(read_row.row)
        # By problem and not by row, so the same problem in another wording is held out too.
        elif source.is_held_out(read_row.problem):
            num_held_out += 1
        else:
            for name, shared_rows in overlap.items():
                if read_row.problem in (evaluation_problems or {})[name]:
                    shared_rows.append(read_row.row)
    _check_bad(source, num_bad, num_rows, example)
    return Scan(
        rows=num_rows,
        held_out=num_held_out,
        bad=num_bad,
        example=example,
        with_tools=num_with_tools,
        duplicates=len(keys) - len(np.unique(np.array(keys, np.uint64))),
        too_long=tuple(too_long),
        overlap={name: tuple(rows) for name, rows in overlap.items()},
        note=lengths.take_note(),
    )


def _read(source: TableSource, progress: Progress) -> Iterator[ReadRow]:
    is_big = sum(file.size for file in source.files) >= _BIG_BYTES
    for first in range(0, len(source), _ROWS_AT_ONCE):
        if is_big:
            progress(f"reading {source.name}", first / len(source))
        yield from source.read(first, min(first + _ROWS_AT_ONCE, len(source)))
    if is_big:
        progress(f"reading {source.name}", 1.0)


def _cached(
    source: TableSource, lengths: Lengths, evaluation_problems: Mapping[str, set[int]], cache: Path, progress: Progress
) -> Scan:
    """Scan a source, or return an earlier run's findings for the same files and settings."""
    if sum(file.size for file in source.files) < _CACHED_BYTES:
        return _scan(source, lengths, evaluation_problems=evaluation_problems, progress=progress)
    cache_key = [
        *(_VERSION, [(str(table.path.resolve()), table.path.stat().st_mtime_ns) for table in source.tables]),
        *(source.files, source.columns, _template_text(source), source.held_out_share, source.max_bad_rows),
        # Everything that the findings depend on; files by modification time and identity, not by a hash of all their
        # bytes.
        *(lengths.limit, lengths.digest(), {name: sorted(keys) for name, keys in evaluation_problems.items()}),
    ]
    path = cache / "scans" / f"{hashlib.sha256(repr(cache_key).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, AttributeError, ForgeError
    ):  # on a cache miss, scan the files
        make_private(path.parent, TaskError)
        return _from_json(json.loads(path.read_bytes()))
    scan = _scan(source, lengths, evaluation_problems=evaluation_problems, progress=progress)
    with contextlib.suppress(OSError, ForgeError):
        make_private(path.parent, TaskError)
        # Renamed into place when it is whole, as another run may read or write the same file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(dataclasses.asdict(scan), file)
        os.replace(file.name, path)
    return scan


def _template_text(source: TableSource) -> str:
    """Return the text of a template file, which may have changed; "" if the template is not a file."""
    path = Path(source.columns.template or ".").expanduser()
    with contextlib.suppress(OSError):
        return path.read_text() if path.is_file() else ""
    return ""


def _from_json(fields: dict[str, Any]) -> Scan:
    overlap = {name: tuple(map(int, rows)) for name, rows in fields["overlap"].items()}
    return Scan(**{**fields, "too_long": tuple(map(int, fields["too_long"])), "overlap": overlap})
