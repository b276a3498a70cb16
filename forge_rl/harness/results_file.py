"""Results of an evaluated model in a file that a later evaluation resumes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.metrics.step_lines import writing
from forge_rl.run.records.json_files import write_json
from forge_rl.system.folders import is_there, reading, write_whole
from forge_rl.types import Episode, Outcome, Score, Task

_WEIGHTS = ("config.json", "*.safetensors", "tokenizer*", "chat_template*")
"""Files of a model that its results depend on."""

Sets = Mapping[str, Sequence[Task]]
Key = tuple[str, str, str]
"""Set and source of a task, and a digest of its content, as files may change."""


class Results:
    """Results of one model: a file with a line per finished task, read on construction.

    Args:
        path: the file; malformed lines, such as an incomplete last one, are dropped.
        sets: tasks by set. Lines of other tasks are ignored.

    Raises:
        CheckpointError: the file cannot be read or written; finished tasks stay in it.
    """

    def __init__(self, path: Path, sets: Sets) -> None:
        self._path = path
        self._tasks = {_key(name, task): task for name, tasks in sets.items() for task in tasks}
        self.episodes: dict[Key, Sequence[Episode]] = {}
        """Episodes of the finished tasks."""
        with reading(path):
            content, intact = path.read_bytes() if is_there(path) else b"", b""
        for line in content.splitlines(keepends=True):
            result = self._read(line)
            if result is not None:
                intact += line
                key, episodes = result
                # Tasks that failed are evaluated again.
                if key in self._tasks and all(episode.outcome.scored for episode in episodes):
                    self.episodes[key] = episodes
        if intact != content or not content:  # replaced in one step, as it holds hours of work
            with writing(path):
                write_whole(path, intact)

    def add(self, name: str, episodes: Sequence[Episode]) -> None:
        """Store the episodes of a task.

        Raises:
            CheckpointError: they cannot be written.
        """
        task = episodes[0].task
        rows = [
            {
                "reward": episode.reward,
                "parts": dict(episode.score.parts) if episode.score else {},
                "answer": episode.score.answer if episode.score else "",
                "outcome": episode.outcome.value,
                "problem": episode.problem,
                "turns": [turn.text for turn in episode.turns],
                "tokens": episode.response_tokens,
            }
            for episode in episodes
        ]
        key = _key(name, task)
        row = {"set": name, "source": task.source, "task": task.id, "digest": key[2], "messages": task.messages}
        row["episodes"] = rows
        # One line a task, appended at once: a crash loses at most the line being written, which `__init__` drops.
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        self.episodes[key] = episodes

    def missing(self, sets: Sets) -> Sets:
        """Return the unfinished tasks by set."""
        return {name: [task for task in tasks if _key(name, task) not in self.episodes] for name, tasks in sets.items()}

    def of_set(self, name: str, tasks: Sequence[Task]) -> list[Sequence[Episode]]:
        """Return the episodes of each task of a set."""
        return [self.episodes[_key(name, task)] for task in tasks]

    def _read(self, line: bytes) -> tuple[Key, list[Episode]] | None:
        try:
            row = json.loads(line)
            key = (row["set"], row["source"], row["digest"])
            # Lines of tasks that are not asked for this time are kept as well: another command may want them.
            task = self._tasks.get(key) or Task(id=row["task"], source=row["source"], messages=())
            return key, [
                Episode(
                    task=task,
                    turns=(),
                    score=Score(total=float(saved_episode["reward"]), answer=str(saved_episode["answer"])),
                    outcome=Outcome(saved_episode["outcome"]),
                    problem=str(saved_episode["problem"]),
                )
                for saved_episode in row["episodes"]
            ]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


def short_digest(text: str) -> str:
    """Return 8 hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_settings(out: Path, digest: str, settings: object) -> None:
    """Check that results already in a folder have the same settings, and write the settings there.

    Raises:
        ConfigError: the settings differ, or the folder cannot be read or written.
    """
    path = out / "settings.json"
    try:
        # Results of other settings in one file would be averaged as if they were comparable.
        if path.exists() and json.loads(path.read_text()).get("digest") != digest:
            raise ConfigError(f"{out} holds results with other settings", hint="set another --out, or leave it out")
        write_json(path, {"digest": digest, "settings": settings})
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}", hint="set another --out") from error


def results_name(name: str, folder: Path) -> str:
    """Return the name of a model's results without a suffix; it includes a digest of its files, as they may change."""
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    # Sizes and times instead of contents: weights may be hundreds of GB.
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{Path(name).name or 'model'}-{short_digest(json.dumps([str(folder), stamps]))}"


def _key(name: str, task: Task) -> Key:
    return (
        name,
        task.source,
        short_digest(json.dumps([task.id, task.messages, task.truth], default=str, sort_keys=True)),
    )
