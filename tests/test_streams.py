"""Programs whose standard streams are closed, whose terminal is gone, or whose reader has read enough."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.system import streams
from forge_rl.system.streams import lasting, reader_failure
from tests.commands import ROOT
from tests.test_show import run_folder

PROGRAM = """
import asyncio, dataclasses, logging, os, subprocess, sys, warnings
from pathlib import Path
from rich.console import Console
from forge_rl.run.launch import launch

@dataclasses.dataclass(frozen=True)
class Config:
    file: str
    fails: bool = False

async def main(config):
    sys.stdin.readline()
    for number in range(3):
        print("x" * 100_000, flush=True)
        sys.stdout.buffer.write(b"bytes")
        Console().print("a table")
        print("an error", file=sys.stderr)
        logging.error("logged")
        warnings.warn(f"warning {number}")
        subprocess.run(["sh", "-c", "echo from a child; echo and its errors >&2"], check=True)
        os.write(2, b"native code")
    first = os.open(config.file, os.O_WRONLY | os.O_CREAT)
    os.write(first, b"whole")
    if config.fails:
        raise ValueError("the end" + "!" * 10_000_000)

launch(Config, main)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return [sys.executable, str(script), "--file", str(tmp_path / "file")]


def test_a_program_goes_on_when_nobody_reads_its_output(program: list[str], tmp_path: Path) -> None:
    read, write = os.pipe()
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=write, stderr=write) as running:
        os.close(write)
        os.close(read)
        running.communicate(b"\n", timeout=120)
    assert running.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_program_goes_on_when_its_terminal_is_gone(program: list[str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    running.communicate(b"\n", timeout=120)
    assert running.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_program_without_streams_does_not_print_into_its_files(program: list[str], tmp_path: Path) -> None:
    command = f"{' '.join(program)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120).returncode == 0
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_an_unexpected_error_with_a_long_text_is_shown_shortened(program: list[str]) -> None:
    done = subprocess.run([*program, "--fails"], cwd=ROOT, input=b"\n", capture_output=True, timeout=120)
    assert done.returncode == 1
    assert b"ValueError: the end!" in done.stderr
    assert len(done.stderr) < 20_000


def unread(command: list[str]) -> tuple[int, bytes]:
    """The status and errors of a program whose stdout nobody reads."""
    read, write = os.pipe()
    with subprocess.Popen(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE) as running:
        os.close(write)
        os.close(read)
        assert running.stderr is not None
        errors = running.stderr.read()
        return running.wait(120), errors


@pytest.mark.parametrize("program", ["forge_rl show", "apps.show"])
def test_a_program_that_only_prints_ends_when_nobody_reads_it(program: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    command = [sys.executable, "-m", *program.split(), str(folder), "--whole"]
    assert unread(command) == (141, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, b"Traceback" in done.stderr) == (1, False)
    assert b"stdout cannot be written: No space left on device" in done.stderr


@pytest.mark.parametrize("words", ["forge_rl --help", "forge_rl show --help", "apps.runs --help"])
def test_help_that_nobody_reads_is_no_error(words: str) -> None:
    status, errors = unread([sys.executable, "-m", *words.split()])
    assert (status in (0, 141), errors) == (True, b"")


def test_a_run_of_a_benchmark_goes_on_when_nobody_reads_it(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    read, write = os.pipe()
    command = [sys.executable, "-m", "benchmarks.intervals", "--draws", "1", "--json", str(report)]
    with subprocess.Popen(command, cwd=ROOT, stdout=write, stderr=write) as running:
        os.close(write)
        os.close(read)
        assert running.wait(300) == 0
    assert report.is_file()


def test_a_full_disk_costs_what_is_written_meanwhile(tmp_path: Path) -> None:
    limited = (
        "import resource, sys; from forge_rl.system.streams import outlive_readers; outlive_readers()\n"
        "print('before', flush=True); resource.setrlimit(resource.RLIMIT_FSIZE, (7, -1))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); print('lost', flush=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)); print('after', flush=True)"
    )
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", limited], cwd=ROOT, stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "before\nafter\n"


@pytest.mark.usefixtures("high_descriptors")
def test_what_a_slow_reader_has_no_room_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_SLOW_READER_S", 0.0)
    read, write = os.pipe()
    os.set_blocking(write, False)
    file = streams.LastingFile(write)
    # A pipe holds 64 KiB.
    assert [file.write(bytes(1 << 16)) for _ in range(2)] == [1 << 16] * 2
    assert len(os.read(read, 1 << 20)) == 1 << 16
    os.close(read)
    os.close(write)


def test_a_stream_says_why_its_reader_is_gone() -> None:
    read, write = os.pipe()
    stream = lasting(write)
    print("read", file=stream, flush=True)
    assert reader_failure(stream) == ""
    os.close(read)
    print("not read", file=stream, flush=True)
    assert "Broken pipe" in reader_failure(stream)
    os.write(write, b"leads to nowhere")
    os.close(write)
