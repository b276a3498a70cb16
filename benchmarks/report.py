"""Common parts of benchmarks: flags, and the report with commit, versions and machine, as a table and as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.sigterm import exit_on_sigterm
from forge_rl.errors import ForgeError
from forge_rl.run.records.run_dir import as_json, versions
from forge_rl.system.allocator import allocator_environment
from forge_rl.system.streams import outlive_readers

LEAST_REPEATS = 5
"""Minimum repeats for a meaningful median."""


class BenchmarkError(ForgeError):
    """A benchmark that could not measure its subject or write its report."""


def check_repeats(count: int, flag: str = "--repeats") -> None:
    """Check that there are enough measurements for a median.

    Raises:
        BenchmarkError: there are fewer than `LEAST_REPEATS`; names the flag to raise.
    """
    if count < LEAST_REPEATS:
        raise BenchmarkError(f"{flag} is {count}, too few for a median", hint=f"set {flag} to {LEAST_REPEATS} or more")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Flags of every benchmark."""

    json: Path | None = None
    """File to write the report to. An existing file is removed when the benchmark starts, so that a failed run leaves
    no old numbers behind."""


C = TypeVar("C", bound=BenchmarkConfig)


class Report:
    """Measurements of a benchmark, with its machine, versions and settings.

    Args:
        benchmark: name of the benchmark.
        config: its flags.
    """

    def __init__(self, benchmark: str, config: BenchmarkConfig | None = None) -> None:
        self.benchmark = benchmark
        self.rows: list[dict[str, object]] = []
        """Raw measurements, one per repeat, with warm-up marked."""
        self.results: dict[str, float] = {}
        """The benchmark's results by name."""
        self.versions: dict[str, object] = {**versions()}
        """Package versions by name; a peer with its own environment has its own object, under its name."""
        self.commit = str(self.versions.pop("git"))
        self.machine = machine()
        self.settings = as_json(config)
        if isinstance(self.settings, dict):
            self.settings.pop("json", None)  # where this file goes
        self.date = datetime.now(UTC).date().isoformat()
        self.command = f"python -m benchmarks.{benchmark}"
        """Command that repeats the measurement; `run_benchmark` adds the flags."""
        self.spreads: dict[str, tuple[float, float, int]] = {}
        """Minimum, maximum and number of repeats of each result that is a median."""

    def measure(self, name: str, values: Sequence[float]) -> float:
        """Record the median of repeats as a result, with its spread.

        Returns:
            The median.
        """
        self.spreads[name] = (*spread(values), len(values))
        self.results[name] = median(values)
        return self.results[name]

    def as_json(self) -> dict[str, object]:
        """Return the content of the JSON file."""
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "date": self.date,
            "commit": self.commit,
            "versions": self.versions,
            "machine": self.machine,
            "settings": self.settings,
            "rows": self.rows,
            "results": self.results,
            "spreads": self.spreads,
        }

    def table(self) -> Table:
        """Return the results as a table for the terminal."""
        table = Table(title=self.benchmark, caption=self._caption(), caption_justify="left", title_justify="left")
        table.add_column("result")
        table.add_column("median", justify="right")
        table.add_column("lowest to highest", justify="right")
        table.add_column("repeats", justify="right")
        for name, value in self.results.items():
            low, high, repeats = self.spreads.get(name, (0.0, 0.0, 0))
            table.add_row(name, f"{value:.4g}", *((f"{low:.4g} to {high:.4g}", str(repeats)) if repeats else ("", "")))
        return table

    def write(self, path: Path) -> None:
        """Write the JSON file atomically, with null for a number that is not finite.

        Raises:
            BenchmarkError: it cannot be written.
        """
        content = json.dumps(_finite(self.as_json()), indent=1, allow_nan=False) + "\n"
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                    os.chmod(file.name, 0o644)
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from error

    def _caption(self) -> str:
        ours = {name: value for name, value in self.versions.items() if not isinstance(value, Mapping)}
        peers = [f"{name}: {_listed(value)}" for name, value in self.versions.items() if isinstance(value, Mapping)]
        return "\n".join([f"commit {self.commit}", _listed(self.machine), _listed(ours), *peers])


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    if not values:
        raise BenchmarkError("nothing was measured, so the median is undefined")
    return statistics.median(values)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the minimum and the maximum."""
    if not values:
        raise BenchmarkError("nothing was measured, so the spread is undefined")
    return min(values), max(values)


def machine() -> dict[str, object]:
    """Describe the machine, without identifying it or its user."""
    description: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_at_start": round(os.getloadavg()[0], 2),
        "trainer_heap": "tcmalloc" if allocator_environment() else "glibc",
    }
    if gpus := _gpus():
        description["gpu"] = gpus
    return description


def check_writable(path: Path) -> None:
    """Check before a long run that the report can be written, and remove an older one.

    Raises:
        BenchmarkError: it cannot be written; gives the cause.
    """
    if path.is_dir():
        raise _cannot_write(path, "it is a folder")
    if not path.parent.is_dir():
        raise _cannot_write(path, f"there is no folder {path.parent}")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-"):
            pass
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error


def _without_json(args: Sequence[str]) -> list[str]:
    """Remove --json and its path, which may contain private folder names."""
    kept_args, skip = [], False
    for arg in args:
        if not (skip or arg.startswith("--json=") or arg == "--json"):
            kept_args.append(arg)
        skip = arg == "--json"
    return kept_args


def without_nan(deviation: float) -> float:
    """Return a deviation, inf for NaN: `max` may pass over NaN, so that a bound would hold."""
    return math.inf if math.isnan(deviation) else deviation


def run_benchmark(
    name: str, config_class: type[C], measure: Callable[[C, Report], None], args: Sequence[str] | None = None
) -> None:
    """Parse flags, measure, print the table, write the file and exit.

    Exit status: 0 on success, 1 after an error, 2 for wrong flags, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        name: name of the benchmark.
        config_class: class of its flags.
        measure: fills the report, or raises a ForgeError.
        args: flags; the command line's by default.
    """
    args = sys.argv[1:] if args is None else args
    outlive_readers()
    try:
        config = tyro.cli(config_class, prog=f"python -m benchmarks.{name}", args=args)
        with exit_on_sigterm():
            report = Report(name, config)  # before an older report in this checkout is removed, an uncommitted change
            if config.json is not None:
                check_writable(config.json)
            report.command = shlex.join([*report.command.split(), *_without_json(args)])
            measure(config, report)
            Console(highlight=False).print(report.table())
            if config.json is not None:
                report.write(config.json)
                print(f"wrote {config.json}")
    except KeyboardInterrupt:
        sys.exit(130)
    except ForgeError as error:
        message = Text(f"{name} failed: ", style="bold red").append(str(error), style="default")
        Console(stderr=True, highlight=False, soft_wrap=True).print(message)
        sys.exit(1)
    sys.exit(0)


def _finite(value: object) -> object:
    """Return a value as JSON has it: None for each number that is not finite."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: _finite(part) for name, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
    return value


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cannot_write(path: Path, why: str) -> BenchmarkError:
    return BenchmarkError(f"the report {path} cannot be written: {why}", hint="pass --json a writable file")


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]
