"""Count the files of forge_rl that one thing passes through, and write the table of docs/reference/walks.md.

    python -m tools.walks                     # all walks, a few minutes
    python -m tools.walks --walks cell --files

Each walk is traced in runs on a model of 3 M parameters, in all of their processes: see tools/walk_hook.
"""

from __future__ import annotations

import ast
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil  # type: ignore[import-untyped]
import tyro

from tools.walk_hook.sitecustomize import ENTRY, FOLDER, MAX_ENTRIES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "forge_rl"
PAGE = ROOT / "docs" / "reference" / "walks.md"
TABLE = re.compile(r"(<!-- walks -->\n)(?:.*?)(?=<!-- end -->)", re.DOTALL)
Name = Literal["row", "weight", "request", "flag", "engine", "cell"]
TITLES: dict[Name, str] = {
    "row": "a row of a JSONL file to its loss",
    "weight": "a weight from the trainer to an engine",
    "request": "an agent's request to the optimizer step on its tokens",
    "flag": "the text of `--schedule.max-lag` to its use",
    "engine": "an engine's death to its successor's first token, beyond the files of a step",
    "cell": "a cell of `--env python` to its output",
}
_WATCHES = re.compile(r"types\.py|errors\.py|(metrics|system)/.*")
"""Files that every walk passes through, and files that only watch."""
_KEEPS = re.compile(r"run/.*")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEADLINE_S = 1200.0
_RUN = (
    *("--groups-per-batch", "2", "--group-size", "4", "--evaluation.tasks", "0", "--checkpoint-every", "0"),
    *("--schedule.max-lag", "0", "--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25"),
    *("--display", "plain"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Count the files of forge_rl that one thing passes through."""

    walks: tuple[Name, ...] = tuple(TITLES)
    """Walks to trace. The page is written only with all of them."""
    files: bool = False
    """List the files of each walk in the order in which they are entered."""


class Entry(NamedTuple):
    """An entry into a function."""

    time_s: float
    file: str
    """Path in forge_rl."""
    function: str
    process: str


class Walk(NamedTuple):
    """What a walk passes through."""

    files: list[str]
    """In the order in which they are first entered."""
    processes: int


class Trace:
    """All entries of a run, in order of time."""

    def __init__(self, folder: Path) -> None:
        names = {zlib.crc32(name.encode()): name for name in _sources()}
        assert len(names) == len(list(_sources())), "two paths have one checksum"
        self.entries: list[Entry] = []
        for path in folder.iterdir():
            data = path.read_bytes()
            for time_s, file, line in ENTRY.iter_unpack(data):
                if time_s == 0:
                    break
                name = names[file]
                self.entries.append(Entry(time_s, name, _functions(PACKAGE / name)[line], path.name))
            else:
                raise RuntimeError(f"a process of the run entered more than {MAX_ENTRIES} functions")
        self.entries.sort()

    def times(self, file: str, function: str) -> list[float]:
        """Return the times at which a function was entered."""
        if function not in _functions(PACKAGE / file).values():
            raise RuntimeError(
                f"forge_rl/{file} has no function {function}: correct the walk that starts or ends there"
            )
        return [entry.time_s for entry in self.entries if (entry.file, entry.function) == (file, function)]

    def first(self, file: str, function: str, *, after_s: float = 0.0) -> float:
        """Return the time at which a function was first entered, from `after_s` on."""
        for time_s in self.times(file, function):
            if time_s >= after_s:
                return time_s
        raise RuntimeError(f"{function} of forge_rl/{file} was not entered: the walk is not complete")

    def between(self, start_s: float, end_s: float) -> list[Entry]:
        """Return the entries from one time to another, both included."""
        return [entry for entry in self.entries if start_s <= entry.time_s <= end_s]


def _sources() -> Iterable[str]:
    return (str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@functools.cache
def _functions(path: Path) -> dict[int, str]:
    """Return the qualified names of a file's functions by their lines."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{child.name}" if isinstance(child, _DEFINITIONS) else ""
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                names[child.lineno] = name
            visit(child, f"{name}." if name else prefix)

    visit(ast.parse(path.read_text()), "")
    return names


def walk(entries: Sequence[Entry], *, left_out: Iterable[str] = (), counts_run: bool = False) -> Walk:
    """Return the files of entries, without those that only watch or record the run, and the number of processes."""
    counted_entries = [
        entry
        for entry in entries
        if not _WATCHES.fullmatch(entry.file) and (counts_run or not _KEEPS.fullmatch(entry.file))
    ]
    files = dict.fromkeys(entry.file for entry in counted_entries)
    return Walk(
        [file for file in files if file not in set(left_out)], len({entry.process for entry in counted_entries})
    )


def row(trace: Trace) -> Walk:
    """Follow a row of the second step, when all processes have started."""
    (publish_s, *_) = _publishes(trace)
    draw_s = trace.first("data/sources/table_source.py", "TableSource.draw", after_s=publish_s)
    return walk(trace.between(draw_s, trace.first("algorithms/losses.py", "PolicyLoss.__call__", after_s=draw_s)))


def weight(trace: Trace) -> Walk:
    """Follow the publish of the second step until engines decode with it."""
    (_, publish_s, *_) = _publishes(trace)
    return walk(trace.between(publish_s, trace.first("run/run.py", "Run.log", after_s=publish_s)))


def request(trace: Trace) -> Walk:
    """Follow an agent's request of the second step until the trainer steps."""
    (publish_s, *_) = _publishes(trace)
    request_s = trace.first("gateway/connections.py", "HttpProtocol.on_message_begin", after_s=publish_s)
    step_s = trace.first("engines/titan/train.py", "TitanEngine.optimizer_step", after_s=request_s)
    return walk(trace.between(request_s, step_s))


def flag(trace: Trace) -> Walk:
    """Follow a flag: what reads and checks flags before the recipe starts, and functions that read the flag's field."""
    start_s = trace.first("run/launch.py", "launch")
    main_s = trace.first("run/launch.py", "_run")
    made_s = trace.first("rollout/executor.py", "RolloutExecutor.__init__", after_s=main_s)
    readers = {(file, function) for file in _sources() for function in _readers(PACKAGE / file)}
    reads = [
        entry
        for entry in trace.between(start_s, made_s)
        if entry[1:3] in readers or (entry.time_s < main_s and entry.file.startswith(("flags/", "run/")))
    ]
    return walk(reads, counts_run=True)


def _readers(path: Path) -> Iterable[str]:
    """Return the functions of a file that read the flag's field, or the property that is made of it."""
    functions = _functions(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            isinstance(part, ast.Attribute) and part.attr in ("max_lag", "lag") for part in ast.walk(node)
        ):
            yield functions[node.lineno]


def engine(trace: Trace, killed_s: float) -> Walk | None:
    """Follow the death of an engine until another process decodes in its place; None if none has."""
    first_publish_s, second_publish_s, *_ = _publishes(trace)
    step_files = {entry.file for entry in trace.between(first_publish_s, second_publish_s)}
    old_processes = {entry.process for entry in trace.entries if entry.time_s < killed_s}
    decode = ("services/generator_actor.py", "GeneratorActor.stream")
    trace.times(*decode)  # which checks the name
    later_entries = trace.between(killed_s, float("inf"))
    decodes = (entry.time_s for entry in later_entries if entry[1:3] == decode and entry.process not in old_processes)
    decode_s = next(decodes, None)
    return None if decode_s is None else walk(trace.between(killed_s, decode_s), left_out=step_files)


def cell(trace: Trace) -> Walk:
    """Follow the second cell of an episode, for which a session has started."""
    (_, step_s) = trace.times("worlds/code_world.py", "CodeWorld.step")
    return walk(trace.between(step_s, trace.first("worlds/code_world.py", "CodeWorld.close", after_s=step_s)))


def _publishes(trace: Trace) -> list[float]:
    """Return the times at which steps began to publish, without the version before the first step."""
    return trace.times("services/trainer.py", "Trainer.publish")[1:]


def run_cells() -> None:
    """Run two cells of an episode, as a worker of environments does."""
    import asyncio

    import forge_rl as rl

    async def play() -> None:
        task = rl.Task(id="1", source="walks", messages=({"role": "user", "content": "What is 1 + 1?"},), truth={})
        world = rl.PythonEnv()(task)
        await world.reset()
        for code in ("number = 1", "number + 1"):
            step = await world.step(f"```python\n{code}\n```", truncated=False, calls=())
        await world.close()
        assert "2" in str(step.messages), step

    asyncio.run(play())


class Run:
    """A traced command, in a folder of its own; processes of it that still run are ended with the block.

    with Run(folder / "cells", "-c", "...") as run:
        run.await_end()
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.out = folder / "out"
        self._traces = folder / "traces"
        self._traces.mkdir(parents=True)
        paths = [ROOT / "tools" / "walk_hook", ROOT]
        with (folder / "log").open("w") as log:
            self._process = psutil.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | {FOLDER: str(self._traces), "PYTHONPATH": os.pathsep.join(map(str, paths))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._log = folder / "log"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is not None:
            return
        children = self._process.children(recursive=True)
        self._process.terminate()
        _, alive = psutil.wait_procs([self._process, *children], timeout=60)
        for process in alive:
            process.kill()

    def await_end(self) -> None:
        """Wait until it has ended.

        Raises:
            RuntimeError: it failed.
        """
        if self._process.wait(_DEADLINE_S) != 0:
            raise RuntimeError(f"a traced command failed:\n{self._log.read_text()}")

    def await_steps(self, steps: int) -> None:
        """Wait until a recipe has done so many steps."""
        deadline_s = time.monotonic() + _DEADLINE_S
        lines = self.out / "metrics.jsonl"
        while not lines.exists() or sum("loss" in json.loads(line) for line in lines.open()) < steps:
            if not self._process.is_running() or time.monotonic() > deadline_s:
                raise RuntimeError(f"a traced run did not come to step {steps}:\n{self._log.read_text()}")
            time.sleep(0.1)

    def kill_engine(self) -> float:
        """Kill the first process of an engine, and return the time."""
        logs = {process: _log_of(process) for process in self._process.children(recursive=True)}
        processes = [process for process, log in logs.items() if log.startswith("generator-1.")]
        killed_s = time.monotonic()
        min(processes, key=lambda process: float(process.create_time())).kill()
        return killed_s

    def trace(self) -> Trace:
        """Return all entries that the command has recorded."""
        return Trace(self._traces)


def _log_of(process: psutil.Process) -> str:
    try:
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
    except OSError:  # it has ended
        return ""


def trace_cells(folder: Path) -> dict[Name, Walk]:
    """Trace the walk of a sandbox."""
    with Run(folder / "cells", "-c", "from tools.walks import run_cells; run_cells()") as run:
        run.await_end()
    return {"cell": cell(run.trace())}


def trace_recipe(folder: Path, model: Path) -> dict[Name, Walk]:
    """Trace the walks of a recipe: three steps, an engine's death, and as many as its successor needs."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(999)))
    flags = ("--tasks", f"{tasks}:question=question,answer=answer", "--generator.replicas", "2", "--steps", "100000")
    out = folder / "recipe" / "out"
    with Run(folder / "recipe", "-m", "tests.tiny", "--model", str(model), "--out", str(out), *_RUN, *flags) as run:
        run.await_steps(3)
        killed_s = run.kill_engine()
        deadline_s = time.monotonic() + _DEADLINE_S
        while (successor := engine(run.trace(), killed_s)) is None:
            if time.monotonic() > deadline_s:
                raise RuntimeError("no engine decoded in place of the one that was killed")
            run.await_steps(3)  # raises if the run has ended
            time.sleep(2.0)
        trace = run.trace()
    return {"row": row(trace), "weight": weight(trace), "flag": flag(trace), "engine": successor}


def trace_agent(folder: Path, model: Path) -> dict[Name, Walk]:
    """Trace an agent's walk."""
    tasks = "chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
    flags = ("--tasks", tasks, "--steps", "2")
    out = folder / "agent" / "out"
    with Run(
        folder / "agent", "-m", "tests.tiny_agent", "--model", str(model), "--out", str(out), *_RUN, *flags
    ) as run:
        run.await_end()
    return {"request": request(run.trace())}


def table(walks: Mapping[Name, Walk]) -> str:
    """Return walks as Markdown, below the command, date and commit."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [
        "    python -m tools.walks",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit `{commit}`.",
        "",
        "| walk | from, to | files | processes |",
        "|---|---|---|---|",
        *(f"| {name} | {TITLES[name]} | {len(walk.files)} | {walk.processes} |" for name, walk in walks.items()),
    ]
    return "\n".join([*lines, ""])


def main(config: Config) -> None:
    """Trace walks, print them, and write the page if they are all."""
    walks: dict[Name, Walk] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "cell" in config.walks:
            walks |= trace_cells(folder)
        if set(config.walks) - {"cell"}:
            from tests.tiny import bundled_folder, make_tiny_model

            model = make_tiny_model(folder / "model", bundled_folder())
            if set(config.walks) - {"cell", "request"}:
                walks |= trace_recipe(folder, model)
            if "request" in config.walks:
                walks |= trace_agent(folder, model)
    walks = {name: walks[name] for name in TITLES if name in config.walks}
    text = table(walks)
    print(text)
    if config.files:
        for name, traced_walk in walks.items():
            print(f"{name}:", *traced_walk.files, sep="\n  ")
    if len(walks) == len(TITLES):
        page = PAGE.read_text()
        PAGE.write_text(TABLE.sub(lambda match: match[1] + text, page))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
