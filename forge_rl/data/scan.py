"""Scans files before a run: bad rows, overlong prompts, duplicates, overlap with evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_rl.data.mixture import Mixture
from forge_rl.data.sources.table_source import Place, ReadRow, TableSource
from forge_rl.errors import ForgeError, ModelError, TaskError
from forge_rl.system.folders import make_private
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task

Progress = Callable[[str, float], None]

_VERSION = 1
_ROWS_AT_ONCE = 512
_MOST_KEYS = 1 << 21
"""Number of problem keys at which half are dropped, repeatedly; duplicates are then estimated."""
_BIG_BYTES = 1 << 25
"""Minimum total size of files for which progress is shown."""
_CACHED_BYTES = 1 << 22
"""Minimum total size of files for which the findings are cached."""
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
    estimated: bool = False
    """True if duplicates are estimated from a subset of the problems."""
    too_long: tuple[Place, ...] = ()
    """Rows whose prompt leaves no room for an answer."""
    overlap: Mapping[str, tuple[Place, ...]] = dataclasses.field(default_factory=dict)
    """Training rows whose problem is also in an evaluation set, by set name."""

    @property
    def trained(self) -> int:
        """Number of rows trained on per epoch."""
        return self.rows - self.held_out - self.bad - len(self.too_long)

    def describe(self, limit: int) -> str:
        """Summarise the findings in one line; `limit` is the prompt limit in tokens."""
        parts = [f"{self.rows:,} rows"]
        parts += [f"{self.held_out:,} held out"] if self.held_out else []
        if self.too_long:
            parts.append(f"{len(self.too_long):,} left out, as their prompts are longer than {limit:,} tokens")
        if self.bad:
            parts.append(f"{self.bad:,} bad rows skipped, the first: {self.example}")
        if self.duplicates:
            parts.append(f"{'about ' if self.estimated else ''}{self.duplicates:,} duplicates")
        return "; ".join(parts)


def check_tasks(
    mixture: Mixture,
    make_tokenizer: Callable[[], Tokenizer],
    *,
    limit: int,
    cache: Path,
    progress: Progress = lambda what, fraction: None,
) -> dict[str, Scan]:
    """Read all files of a mixture once and leave out unusable rows; return the findings by source.

        found = check_tasks(mixture, partial(Tokenizer, model), limit=1008, cache=default_cache())

    From then on, the sources and evaluation sets leave out overlong prompts. Sources that are not files are not
    scanned. Findings for large files are cached.

    Args:
        make_tokenizer: called if there are files.
        limit: maximum tokens of a prompt.
        progress: called for large files with the current step and the fraction done.

    Raises:
        TaskError: too many bad rows; the chat template refuses a row; no row is left; or evaluation problems are also
            trained on and the mixture's overlap is "refuse".
    """
    if not any(isinstance(source, TableSource) for source in (*mixture.sources.values(), *mixture.evaluation.values())):
        return {}
    lengths = PromptLengths(make_tokenizer(), limit)
    problems: dict[str, set[int]] = {}
    found: dict[str, Scan] = {}
    for name, source in mixture.evaluation.items():
        if isinstance(source, TableSource):
            problems[name] = set()
            scan = _scan(source, lengths, problems=problems[name], progress=progress)
            source.leave_out(scan.too_long)
            found[f"evaluation {name}"] = dataclasses.replace(scan, held_out=0)
    for name, source in mixture.sources.items():
        if isinstance(source, TableSource):
            scan = _cached(source, lengths, problems, cache, progress)
            for other, places in scan.overlap.items():
                if places and mixture.overlap == "refuse":
                    raise TaskError(
                        f"{len(places):,} tasks of {name!r} are also in the evaluation {other!r}, the first is "
                        f"{source.describe(places[0])}",
                        hint="remove them from one of the two, or set --data.overlap leave-out",
                    )
            if scan.trained <= 0:
                raise TaskError(f"no task of {name!r} can be trained on: {scan.describe(limit)}", hint=_hint(scan))
            source.leave_out([*scan.too_long, *itertools.chain(*scan.overlap.values())])
            found[name] = scan
    return found


class PromptLengths:
    """Finds overlong prompts; most need no tokenization, as no token is shorter than a byte.

    Args:
        limit: maximum tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self._frame = len(tokenizer.render([{"role": "user", "content": "x"}]))

    def too_long(self, tasks: Sequence[Task]) -> list[bool]:
        """Return for each task whether its prompt exceeds the limit.

        Raises:
            ModelError: the chat template refuses a task.
        """
        return [
            self._frame + _MESSAGE_TOKENS * len(task.messages) + _text_bytes(task) > self.limit
            and self.length(task) > self.limit
            for task in tasks
        ]

    def length(self, task: Task) -> int:
        """Return the number of tokens of a task's prompt."""
        return len(self.tokenizer.render(task.messages, tools=task.tools))

    def digest(self) -> str:
        """Return a digest of everything that the lengths depend on."""
        files = (self.tokenizer.folder / name for name in ("tokenizer.json", "chat_template.jinja"))
        seen = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file()))
        seen.update(str(self.tokenizer.hf.chat_template).encode())
        return seen.hexdigest()


def _text_bytes(task: Task) -> int:
    """Return an upper bound on a task's text in bytes; above any limit if only the template can tell."""
    total = 0
    for message in task.messages:
        content = message.get("content", "")
        if task.tools or len(message) > 2 or not isinstance(content, str):
            return 1 << 40
        total += len(content) if content.isascii() else len(content.encode())
    return total


class _Keys:
    """Counts repeated keys: exactly at first, later from a subset that fits in memory."""

    def __init__(self) -> None:
        self._kept = array("Q")
        self._mask = 0

    def add(self, key: int) -> None:
        if key & self._mask:
            return
        self._kept.append(key)
        if len(self._kept) >= _MOST_KEYS:
            self._mask = self._mask * 2 + 1
            keys = np.frombuffer(self._kept, np.uint64)
            kept = keys[keys & np.uint64(self._mask) == 0]
            del keys
            self._kept = array("Q", kept.tobytes())

    def duplicates(self) -> tuple[int, bool]:
        """Return the number of repeated keys, and True if it is an estimate."""
        repeated = len(self._kept) - len(np.unique(np.frombuffer(self._kept, np.uint64))) if self._kept else 0
        return repeated * (self._mask + 1), self._mask > 0


def _scan(
    source: TableSource,
    lengths: PromptLengths,
    *,
    problems: set[int] | None = None,
    others: Mapping[str, set[int]] | None = None,
    progress: Progress,
) -> Scan:
    """Read all rows of a source and return the findings.

    Args:
        problems: set to which the keys of the source's problems are added.
        others: keys of evaluation problems by set name.
    """
    rows = held_out = bad = 0
    example = ""
    keys = _Keys()
    too_long: list[Place] = []
    overlap: dict[str, list[Place]] = {name: [] for name in others or {}}
    for part in _parts(_read(source, progress)):
        good = []
        for read in part:
            if read.error is None:
                good.append(read)
                continue
            bad += 1
            if source.max_bad_rows == 0:
                raise source.failure(read)
            example = example or f"{source.describe(read.place)}: {read.error}"
        long = _too_long(source, lengths, good, first=rows == 0)
        too_long += [read.place for read, is_long in zip(good, long, strict=True) if is_long]
        for read, is_long in zip(good, long, strict=True):
            keys.add(read.problem)
            if problems is not None:
                problems.add(read.problem)
            if source.is_held_out(read.problem):
                held_out += not is_long
            elif overlap and not is_long:
                for name, places in overlap.items():
                    if read.problem in (others or {})[name]:
                        places.append(read.place)
        rows += len(part)
    if bad > source.max_bad_rows * rows:
        raise TaskError(
            f"{bad:,} of {rows:,} rows of {source.name!r} are bad, more than --data.max-bad-rows "
            f"{source.max_bad_rows:g}; the first: {example}",
            hint="fix them, or raise --data.max-bad-rows",
        )
    duplicates, estimated = keys.duplicates()
    return Scan(
        rows=rows,
        held_out=held_out,
        bad=bad,
        example=example,
        duplicates=duplicates,
        estimated=estimated,
        too_long=tuple(too_long),
        overlap={name: tuple(places) for name, places in overlap.items()},
    )


def _too_long(source: TableSource, lengths: PromptLengths, rows: Sequence[ReadRow], *, first: bool) -> list[bool]:
    tasks = [read.task for read in rows if read.task is not None]
    try:
        if first and tasks:  # the template may refuse these messages, and too_long rarely renders
            lengths.length(tasks[0])
        return lengths.too_long(tasks)
    except ModelError as error:
        for read in rows:
            try:
                assert read.task is not None
                lengths.length(read.task)
            except ModelError as refused:
                raise TaskError(f"{source.describe(read.place)}: {refused.message}", hint=refused.hint) from error
        raise


def _read(source: TableSource, progress: Progress) -> Iterator[ReadRow]:
    big = sum(each.size for each in source.files) >= _BIG_BYTES
    for block in range(source.blocks):
        if big and block * 100 // source.blocks != (block - 1) * 100 // source.blocks:
            progress(f"reading {source.name}", block / source.blocks)
        yield from source.read_block(block)
    if big:
        progress(f"reading {source.name}", 1.0)


def _parts(rows: Iterable[ReadRow]) -> Iterator[list[ReadRow]]:
    rows = iter(rows)
    while part := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        yield part


def _cached(
    source: TableSource, lengths: PromptLengths, others: Mapping[str, set[int]], cache: Path, progress: Progress
) -> Scan:
    """Scan a source, or return an earlier run's findings for the same files and settings."""
    if sum(each.size for each in source.files) < _CACHED_BYTES:
        return _scan(source, lengths, others=others, progress=progress)
    of = [
        *(_VERSION, [(str(table.path.resolve()), table.path.stat().st_mtime_ns) for table in source.tables]),
        *(source.files, source.columns, _template_text(source), source.held_out_share, source.max_bad_rows),
        *(lengths.limit, lengths.digest(), {name: sorted(keys) for name, keys in others.items()}),
    ]
    path = cache / "scans" / f"{hashlib.sha256(repr(of).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, AttributeError, ForgeError
    ):  # on a cache miss, scan the files
        make_private(path.parent, TaskError)
        return _from_json(json.loads(path.read_bytes()))
    scan = _scan(source, lengths, others=others, progress=progress)
    with contextlib.suppress(OSError, ForgeError):
        make_private(path.parent, TaskError)
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


def _from_json(found: dict[str, Any]) -> Scan:
    def places(value: Any) -> tuple[Place, ...]:
        return tuple((int(file), int(place)) for file, place in value)

    read = {name: places(value) for name, value in found.pop("overlap").items()}
    return Scan(**{**found, "too_long": places(found["too_long"]), "overlap": read})


def _hint(scan: Scan) -> str:
    if scan.too_long:
        return "raise --generator.max-model-len, or lower --generator.max-tokens"
    return "provide more rows, or lower --data.held-out-share"
