"""Recipes run from the command line, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from tests.processes import command_line, lives, log_of

if TYPE_CHECKING:
    from forge_rl.run.live.attach import AttachedRun

ROOT = Path(__file__).parent.parent
SHM = Path("/dev/shm")
_DYING_S = 60.0
"""Longest wait for processes that were killed: on a busy machine they take seconds to give their memory back."""


class Command:
    """A recipe in a process of its own, with its output line by line."""

    def __init__(self, *arguments: str, cwd: Path = ROOT, program: Sequence[str] = (sys.executable, "-m")) -> None:
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reads = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seen: set[psutil.Process] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
            if not self._reads:
                break
        self.process.stdout.close()
        self.process.wait()  # its output ends a moment before it does
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 240.0, *, whole: bool = False) -> str:
        """The first line that matches; or what matches in the whole output."""

        def found() -> str | None:
            if whole:
                match = re.search(pattern, self.output)
                return match and match[0]
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended, timeout_s)
        line = found()
        assert line is not None, f"no line matches {pattern!r}:\n" + "\n".join(self.lines)
        self.seen |= set(self.children())
        return line

    def stop_reading(self) -> None:
        """Closes its output after the next line, as a `tee` that ends."""
        self._reads = False

    def children(self) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return children
        except psutil.NoSuchProcess:
            return []

    def end(self, timeout_s: float = 120.0) -> int:
        self._reader.join(timeout_s)
        assert self._ended, f"it runs after {timeout_s} s:\n{self.output}"
        status = self.process.returncode
        assert status is not None
        return status

    def strays(self) -> list[psutil.Process]:
        """Its processes that still live; a moment is given to those that are ending."""
        _, alive = psutil.wait_procs(list(self.seen), timeout=_DYING_S)
        return [process for process in alive if lives(process)]

    def clean_up(self) -> None:
        self.seen |= set(self.children())
        self.process.kill()
        self.process.wait()
        killed = []
        for process in self.seen:
            # Python's tracker of semaphores removes those of processes that were killed, and ends by itself.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in command_line(process):
                    process.kill()
                    killed.append(process)
        end = time.monotonic() + _DYING_S
        while any(map(lives, killed)) and time.monotonic() < end:
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


# With four digits no source draws one task twice in a run of some hundred steps by itself.
_LARGE = "min_terms=2,max_terms=2,min_digits=4,max_digits=4"
TASKS = ("--tasks", f"chain_sum:{_LARGE}*3", f"basic_arithmetic:{_LARGE}*1")


def tiny_flags(model: Path, out: Path, *, has_engines: bool = True) -> tuple[str, ...]:
    """Flags that all small runs share."""
    engines = ("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25") if has_engines else ()
    return ("--model", str(model), "--out", str(out), "--display", "plain", *engines)


def tiny_run(commands: list[Command], model: Path, out: Path, *arguments: str, recipe: str = "tests.tiny") -> Command:
    has_engines = "--reward" in arguments or recipe not in ("recipes.sft", "recipes.dpo", "recipes.reward_model")
    command = Command(recipe, *tiny_flags(model, out, has_engines=has_engines), *arguments)
    commands.append(command)
    return command


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(out / "metrics.jsonl")]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file to which a run may be writing the next one."""
    return path.read_text().rpartition("\n")[0].splitlines()


def tasks_by_step(out: Path) -> dict[int, set[tuple[str, str]]]:
    """Source and task of the episodes that each step trained on, all of which are sampled."""
    tasks: dict[int, set[tuple[str, str]]] = {}
    for line in whole_lines(out / "episodes.jsonl"):
        episode = json.loads(line)
        if episode["outcome"] in ("completed", "truncated"):  # else it failed, and is only kept to be looked at
            tasks.setdefault(episode["step"], set()).add((episode["source"], episode["task"]))
    return tasks


def processes_of(command: Command, service: str, replica: int = 0) -> list[psutil.Process]:
    """The processes of a replica, by the log file that they print to."""
    return [process for process in command.children() if log_of(process).startswith(f"{service}-{replica}.")]


def shared_memory() -> set[Path]:
    """Entries of shared memory, each volume of weights by itself; folders that tests look after are left out."""
    folders = {path for path in SHM.iterdir() if not path.name.startswith(("tests-", "schedule-", "forge_rl-"))}
    with contextlib.suppress(FileNotFoundError):  # it is removed with its last volume
        folders |= {path for path in (SHM / f"forge_rl-{os.geteuid()}").iterdir() if path.is_dir()}
    return folders


def forgotten(before: set[Path], timeout_s: float = _DYING_S) -> set[Path]:
    """Entries that came to shared memory since and that no living process holds; a moment is given to those that end.

    What a living process holds is another test's, or belongs to a process that strays() finds.
    """
    end = time.monotonic() + timeout_s
    while True:
        new = shared_memory() - before
        left = new - held(new) if new else new
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def held(paths: set[Path]) -> set[Path]:
    """Those that a living process has open or mapped, or something in them; semaphores are mapped by another name."""
    used: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours
            for line in (folder / "maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split(maxsplit=5)
                used |= {name[0], f"inode {inode}"} if name and name[0].startswith(f"{SHM}/") else set()
            used |= {os.readlink(path) for path in (folder / "fd").iterdir()}
    mapped_paths = {path for path in paths if any(name == str(path) or name.startswith(f"{path}/") for name in used)}
    for path in paths - mapped_paths:
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            if f"inode {path.stat().st_ino}" in used:
                mapped_paths.add(path)
    return mapped_paths


def actor_of(command: Command, service: str, replica: int = 0) -> psutil.Process:
    """The process of a replica that others of its mesh were started by."""
    return min(processes_of(command, service, replica), key=lambda process: process.create_time())


def wait_for_engines(command: Command, run: AttachedRun, engine_count: str) -> None:
    until = time.monotonic() + 240
    while run.ask("status")["engines"].split("/")[0] != engine_count:
        assert time.monotonic() < until, command.output
        time.sleep(0.5)


def wait_for_step(command: Command, run: AttachedRun, beyond: int) -> None:
    until = time.monotonic() + 240
    while run.step <= beyond:
        assert time.monotonic() < until, command.output
        time.sleep(0.5)


def signal_all(command: Command, number: signal.Signals, *, children: bool = False) -> None:
    """Signals each process of a run, as scancel, systemd and a time limit do; or all but the controller."""
    for process in [psutil.Process(command.process.pid)][children:] + command.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until(holds: Callable[[], bool], command: Command, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert command.process.poll() is None, command.output
        assert time.monotonic() < until, command.output
        time.sleep(0.1)
