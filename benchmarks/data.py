"""Tasks from a large JSON lines file, compared with `datasets`: tasks/s, memory, opening, and resuming midway.

python -m benchmarks.data --json out.json

Creates a file of 2 GB, and removes it afterwards. Each reader is a separate process, and they take turns: ours in
seeded order, with mapping, validation and digest of each row; `datasets` streaming with its shuffle buffer and the same
mapping; and `datasets` loading, which first writes an Arrow copy of the whole file to its cache.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.errors import check_flags

_WORDS = ("the", "sum", "of", "all", "numbers", "which", "divide", "a", "square", "and", "its", "root")
_TEXTS = 1000
"""Number of texts that rows are made from: generating one per row would take longer than reading it."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure reading tasks from a large file."""

    gb: float = 2.0
    """Size of the large file in 10^9 bytes; the small one, for memory growth, has a tenth."""
    tasks: int = 50_000
    """Tasks read per speed measurement."""
    repeats: int = 5
    """Repeats of each, after one warm-up."""
    folder: Path | None = None
    """Folder for the files; a temporary one by default."""
    load: bool = True
    """Also measure `datasets.load_dataset` of the whole file, once: takes minutes and the file's size on disk again."""

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        check_flags(self, "--", minimum={"tasks": 1000}, above={"gb": 0})


def measure(config: Config, report: Report) -> None:
    """Create the files, read them in turn, and compare."""
    with tempfile.TemporaryDirectory(dir=config.folder, prefix="forge_rl-data-") as scratch:
        folder = Path(scratch)
        large, small = folder / "large.jsonl", folder / "small.jsonl"
        rows = write_rows(large, round(config.gb * 1e9))
        write_rows(small, round(config.gb * 1e8))
        print(f"made {rows:,} rows, {large.stat().st_size / 1e9:.2f} GB", flush=True)
        report.versions |= json.loads(_child("versions", small, 0, folder))
        rows_by_reader: dict[str, list[dict[str, float]]] = {}
        for repeat in range(1 + config.repeats):
            # In turn within each repeat, so that a machine that slows down slows all readers.
            for reader, file in (("ours", large), ("ours_small", small), ("stream", large)):
                row = json.loads(_child(reader.partition("_")[0], file, config.tasks, folder))
                report.rows.append({"reader": reader, "warm_up": repeat == 0, **row})
                print(f"{reader}: {', '.join(f'{key} {value:,.4g}' for key, value in row.items())}", flush=True)
                if repeat:
                    rows_by_reader.setdefault(reader, []).append(row)

        def values_of(reader: str, key: str) -> list[float]:
            return [row[key] for row in rows_by_reader[reader]]

        ratios = [
            a / b for a, b in zip(values_of("ours", "tasks_per_s"), values_of("stream", "tasks_per_s"), strict=True)
        ]
        report.measure("tasks_per_s_over_datasets", ratios)
        report.measure("tasks_per_s", values_of("ours", "tasks_per_s"))
        report.measure("tasks_per_s_datasets", values_of("stream", "tasks_per_s"))
        report.measure("open_s", values_of("ours", "open_s"))
        report.measure("resume_s", values_of("ours", "resume_s"))
        report.measure("resume_s_datasets", values_of("stream", "resume_s"))
        report.measure("memory_bytes", values_of("ours", "memory_bytes"))
        report.measure("memory_bytes_datasets", values_of("stream", "memory_bytes"))
        growth = zip(values_of("ours", "memory_bytes"), values_of("ours_small", "memory_bytes"), strict=True)
        report.measure("memory_growth_bytes", [a - b for a, b in growth])
        if config.load:
            row = json.loads(_child("load", large, config.tasks, folder))
            report.rows.append({"reader": "load", "warm_up": False, **row})
            report.results |= {f"{key}_datasets_load": value for key, value in row.items()}


def write_rows(path: Path, size: int) -> int:
    """Write about `size` bytes of rows with questions of various lengths; return the number of rows."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(_WORDS, k=draw.randrange(20, 220))) for _ in range(_TEXTS)]
    rows = written_bytes = 0
    with path.open("w") as file:
        while written_bytes < size:
            words = texts[draw.randrange(_TEXTS)]
            meta = {"level": draw.randrange(5), "source": "benchmark", "notes": words[:200]}
            written_bytes += file.write(
                json.dumps({"problem": f"{rows}: {words}?", "solution": str(draw.randrange(10**6)), "meta": meta})
                + "\n"
            )
            rows += 1
    return rows


def _child(reader: str, file: Path, tasks: int, folder: Path) -> str:
    """Read in a separate process; return its measurements as JSON."""
    command = [sys.executable, "-m", "benchmarks.data_readers", reader, str(file), str(tasks), str(folder / "cache")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchmarkError(f"the reader {reader} failed: {last}", hint="run it alone: " + " ".join(command))
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    run_benchmark("data", Config, measure)
