"""One reader of a JSON lines file, in its own process: prints tasks/s, peak memory, opening and resuming as JSON.

python -m benchmarks.data_readers ours FILE TASKS CACHE
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_COLUMNS = "question=problem,answer=solution"
_BUFFER = 4096
"""Shuffle buffer of `datasets` in rows: about 4 MB."""


def ours(file: Path, tasks: int, cache: Path) -> dict[str, float]:
    """Read with a TableSource, in seeded order."""
    from forge_rl.data.data_config import DataConfig

    before = peak()

    def opened() -> Any:
        (source,) = DataConfig().build([f"{file}:{_COLUMNS}"], seed=0).sources.values()
        return source

    began = time.perf_counter()
    source = opened()
    source.draw()
    open_s = time.perf_counter() - began
    rate = speed(iter(source.draw, None), tasks)
    middle = {**source.state(), "position": len(source) // 2}
    source.restore(middle)
    expected = [source.draw().id for _ in range(10)]
    began = time.perf_counter()
    source = opened()
    source.restore(middle)
    resumed = [source.draw().id]
    resume_s = time.perf_counter() - began
    resumed += [source.draw().id for _ in range(9)]
    # A resumed reader must give the same tasks, or its speed means nothing.
    assert resumed == expected
    return {"tasks_per_s": rate, "open_s": open_s, "resume_s": resume_s, "memory_bytes": peak() - before}


def stream(file: Path, tasks: int, cache: Path) -> dict[str, float]:
    """Read with the streaming reader of `datasets`; resume after half of the tasks with its state_dict."""
    import datasets

    before = peak()

    def opened() -> Any:
        data = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True, cache_dir=str(cache))
        return data.shuffle(seed=0, buffer_size=_BUFFER).map(_as_task)

    began = time.perf_counter()
    data = opened()
    rows = iter(data)
    next(rows)
    open_s = time.perf_counter() - began
    rate = speed(rows, tasks)
    middle = data.state_dict()
    began = time.perf_counter()
    data = opened()
    data.load_state_dict(middle)
    next(iter(data))
    resume_s = time.perf_counter() - began
    return {"tasks_per_s": rate, "open_s": open_s, "resume_s": resume_s, "memory_bytes": peak() - before}


def load(file: Path, tasks: int, cache: Path) -> dict[str, float]:
    """Load with `datasets`, which makes an Arrow copy, and read its rows in random order."""
    import datasets

    before = peak()
    began = time.perf_counter()
    data = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    data = data.shuffle(seed=0)
    _as_task(data[0])
    open_s = time.perf_counter() - began
    rate = speed((_as_task(row) for row in data), tasks)
    return {"tasks_per_s": rate, "open_s": open_s, "memory_bytes": peak() - before}


def speed(rows: Iterator[object], count: int) -> float:
    """Return rows per second over `count` rows."""
    began = time.perf_counter()
    for _ in range(count):
        next(rows)
    return count / (time.perf_counter() - began)


def peak() -> float:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def versions(file: Path, tasks: int, cache: Path) -> dict[str, Any]:
    """Return the peer's package versions."""
    return {name: importlib.metadata.version(name) for name in ("datasets", "pyarrow")}


def _as_task(row: dict[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": row["problem"]}], "truth": {**row, "answer": row["solution"]}}


READERS: dict[str, Callable[[Path, int, Path], dict[str, Any]]] = {
    reader.__name__: reader for reader in (ours, stream, load, versions)
}

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    name, file, tasks, cache = sys.argv[1:]
    print(json.dumps(READERS[name](Path(file), int(tasks), Path(cache))))
