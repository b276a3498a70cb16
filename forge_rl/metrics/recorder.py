"""Keeps whole episodes in the run folder, written by a thread during the run."""

from __future__ import annotations

import functools
import os
import queue
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from forge_rl.errors import CheckpointError, check_flags
from forge_rl.flags.categories import Category
from forge_rl.metrics.episode_files import Kind, RecordedEpisode, write_episodes
from forge_rl.metrics.sinks import RunInfo, Sink
from forge_rl.metrics.step_lines import writing
from forge_rl.system.folders import is_there, reading
from forge_rl.types import Episode

FOLDER = "episodes"
"""Name of the folder in a run folder."""
_NAME = re.compile(r"(\d{6,})-(trained|evaluated|failed)\.parquet")
_MOST_WAITING = 2
"""Batches that wait for the thread; while a disk is slower than the run, further ones are not kept."""
_LISTED = 1000
"""Number of files to delete next that are remembered, to avoid listing the folder for each deletion."""
_MAX_EPISODES = 4096
"""Maximum episodes kept of a step, of each kind: trained, evaluated and failed. Flags bound the episodes kept for
long; this bounds those that one step writes, and the failed episodes that memory holds until then."""
_ROOM_BYTES = 1 << 30
"""Free disk space that is left to checkpoints and logs."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Whole episodes in the run folder: messages, tokens, logprobs, scores; `forge-rl show` prints them."""

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    share: float = 1.0
    """Share of each step's groups, and of the tasks of each evaluation, whose episodes are kept; 0 keeps none."""
    gib: float = 16.0
    """Maximum size of all of them in GiB; files of the earliest steps are deleted first."""

    def __post_init__(self) -> None:
        check_flags(self, "--recording.", minimum={"share": 0}, above={"gib": 0}, below={"share": 1.000001})


def recorded_files(run: Path) -> list[tuple[int, str, Path]]:
    """List the step, kind and path of each file of episodes in a run folder, by step.

    Raises:
        CheckpointError: the folder exists and cannot be read.
    """
    with reading(run / FOLDER):
        names = os.listdir(run / FOLDER) if is_there(run / FOLDER) else []
    files = [(int(match[1]), match[2], run / FOLDER / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(file for file in files if file[2].is_file())


class EpisodeRecorder(Sink):
    """Writes the episodes of each step to files of their own, `episodes/000012-trained.parquet`.

    Nothing here blocks or fails a step. While files cannot be written, or a disk is slower than the run, episodes are
    not kept, and the calls raise an error, which the log turns into a warning.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path, config: Recording) -> None:
        self._run = run
        self._folder = run / FOLDER
        self._config = config
        self._step = 0
        self._bytes: int | None = None
        """Size of all files; None until they were counted."""
        self._earliest: deque[Path] = deque()
        """Some of the files, those to delete next."""
        self._last_step: int | None = None
        """Latest step with a file; None until one was written."""
        self._failed: list[RecordedEpisode] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = threading.Semaphore(_MOST_WAITING)
        self._problem: Exception | None = None
        """Error of the last write."""
        self._told = False
        self._thread: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.glob(".*"):  # of a process that was killed
                path.unlink()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()
        super().start(info)

    def rollback(self, step: int) -> None:
        self._step, self._failed = step, []
        # The thread does this after the writes that were asked for before, so that none of their files appears later.
        self._jobs.put(functools.partial(self._delete_after, step))

    def episode(self, episode: Episode) -> None:
        if not episode.outcome.scored and len(self._failed) < _MAX_EPISODES:
            self._failed.append(
                RecordedEpisode(step=self._step + 1, kind="failed", index=len(self._failed), episode=episode)
            )

    def record(self, step: int, kind: Kind, episodes: Callable[[], Iterable[RecordedEpisode]]) -> None:
        failed_episodes = list[RecordedEpisode]()
        if kind == "trained":
            self._step = step
            # Failed episodes are written with the step during which they failed.
            failed_episodes, self._failed = self._failed, failed_episodes
        # A waiting job holds its whole batch, so that a slow disk would otherwise fill the memory.
        if not self._waiting.acquire(blocking=False):
            raise CheckpointError(f"{self._folder} is written to more slowly than episodes come")
        self._jobs.put(functools.partial(self._write, step, kind, episodes, failed_episodes))
        # The error of an earlier job: this one has not been tried yet.
        self._raise_problem()

    def flush(self) -> None:
        """Wait until everything is written."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def close(self) -> None:
        if self._thread is None:
            return
        if self._failed:  # a run that ends before its first batch
            self._jobs.put(functools.partial(self._write_failed, self._step + 1, self._failed))
            self._failed = []
        self._jobs.put(None)
        self._thread.join()
        self._thread = None
        if not self._told:
            self._raise_problem()

    def _raise_problem(self) -> None:
        """Raise the error of the last write, if it failed."""
        problem = self._problem
        self._told = problem is not None
        if problem is not None:
            with writing(self._folder):
                raise problem

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # raised by the next call
                self._problem = error

    def _write(
        self,
        step: int,
        kind: Kind,
        episodes: Callable[[], Iterable[RecordedEpisode]],
        failed: Sequence[RecordedEpisode],
    ) -> None:
        try:
            self._check_room()
            self._write_failed(step, failed)
            records = _chosen(list(episodes()), self._config)
            if records:
                self._write_file(step, kind, records)
            self._delete_earliest()
            self._problem = None
        finally:
            self._waiting.release()

    def _write_failed(self, step: int, failed: Sequence[RecordedEpisode]) -> None:
        if failed:
            self._write_file(step, "failed", failed)

    def _write_file(self, step: int, kind: Kind, episodes: Sequence[RecordedEpisode]) -> None:
        path = self._folder / f"{step:06d}-{kind}.parquet"
        old_size = _size(path)
        write_episodes(path, episodes)
        if self._bytes is not None:
            self._bytes += _size(path) - old_size
        self._last_step = max(step, self._last_step or 0)

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < _ROOM_BYTES:
            raise CheckpointError(f"{self._folder} has only {free / 1e9:.2f} GB free, which are left to checkpoints")

    def _delete_after(self, step: int) -> None:
        if self._last_step is None:  # files of an earlier process
            later = [path for recorded_step, _, path in recorded_files(self._run) if recorded_step > step]
        else:
            # The names follow from the steps; listing the folder would take longer the longer the run.
            steps = range(step + 1, self._last_step + 1)
            later = [self._folder / f"{number:06d}-{kind}.parquet" for number in steps for kind in get_args(Kind)]
        for path in later:
            self._delete(path)
        self._last_step = step

    def _delete(self, path: Path) -> None:
        if self._bytes is not None:
            self._bytes -= _size(path)
        path.unlink(missing_ok=True)

    def _delete_earliest(self) -> None:
        """Delete the earliest files until all of them fit the bound. Lists the folder only to learn their size, and to
        find the next thousand to delete."""
        while self._bytes is None or self._bytes > self._config.gib * 2**30:
            if self._bytes is not None and self._earliest:
                self._delete(self._earliest.popleft())
                continue
            paths = [path for _, _, path in recorded_files(self._run)]
            self._bytes = sum(map(_size, paths))
            # The latest file stays, however large it is.
            self._earliest.extend(paths[:-1][:_LISTED])
            if not self._earliest:
                break


def _size(path: Path) -> int:
    """Return a file's size; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _chosen(records: Sequence[RecordedEpisode], config: Recording) -> list[RecordedEpisode]:
    """Choose whole groups, spread evenly over the batch, within the bounds; at least one."""
    # A dict keeps the order; an evaluated group is known by its set and its index there.
    groups = list(dict.fromkeys((record.set, record.group) for record in records))
    max_groups = max(1, int(_MAX_EPISODES * len(groups) / max(1, len(records))))
    count = min(len(groups), max_groups, max(1, round(config.share * len(groups))))
    selected_groups = {groups[place * len(groups) // count] for place in range(count)}
    return [record for record in records if (record.set, record.group) in selected_groups]
