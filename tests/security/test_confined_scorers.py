"""Scorers that read what a model wrote: none runs it, and a process that did would find nothing to take or break."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.data.sources import ReasoningGymSource
from forge_rl.errors import InfrastructureError, TaskError
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.confinement import missing_confinement
from forge_rl.rewards.procedural import OWN
from forge_rl.rewards.verifiers import ReasoningGymReward, verify
from forge_rl.rewards.workers import Workers
from forge_rl.types import Score, Task

pytestmark = pytest.mark.processes


async def scored(task: Task, text: str) -> Score:
    score = Auto()(task, text)
    return score if isinstance(score, Score) else await score


@pytest.mark.parametrize("dataset", sorted(OWN))
def test_an_answer_that_is_code_does_not_run(dataset: str, tmp_path: Path):
    params = {"min_string_length": 200, "max_string_length": 300} if dataset == "string_insertion" else {}
    entry = ReasoningGymSource(dataset, params, 0, 0.1).draw().truth["entry"]
    assert isinstance(entry, dict)
    written = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(written)!r}).write_text('ran')"
    for answer in (code, f"[{code}]", f"[[{code}]]", f"({code}) + 1", f"sqrt({code})"):
        assert verify(dataset, params, entry, answer) in (0.0, 0.01)
    assert not written.exists()


def test_columns_of_a_data_file_choose_no_verifier(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    row = '{"question": "What is 2 + %d?", "answer": "5", "dataset": "chain_sum", "entry": {"answer": "7"}, "verifier": "reasoning_gym"}\n'  # noqa: E501
    file.write_text("".join(row % number for number in range(20)))
    mixture = DataConfig().build((str(file),), seed=0)
    task = mixture.draw_from(mixture.source_order(1)[0])
    assert "entry" in task.truth
    assert [asyncio.run(scored(task, text)).total for text in ("5", "7")] == [1.0, 0.0]
    with pytest.raises(TaskError, match="is not from reasoning-gym"):
        asyncio.run(ReasoningGymReward()(task, "7"))


def attempts(parent: int, folder: str, port: int) -> dict[str, str]:
    """Try what a scorer has no business with; returns what was had, by what it was."""

    def read(path: str) -> str:
        return Path(path).read_text(errors="replace")

    def connect() -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return "connected"

    tried = {
        "environment": lambda: [name for name in os.environ if "KEY" in name] or None,
        "environment of the parent": lambda: read(f"/proc/{parent}/environ"),
        "a file": lambda: read(f"{folder}/secret"),
        "a system file": lambda: read("/etc/passwd"),
        "a folder": lambda: os.listdir(folder),
        "a new file": lambda: Path(f"{folder}/new").write_text("x"),
        "an old file": lambda: os.open(f"{folder}/secret", os.O_APPEND),
        "a link": lambda: os.link(f"{folder}/secret", f"{folder}/link"),
        "removing": lambda: (os.unlink(f"{folder}/secret"), "removed"),
        "a Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "a connection": connect,
        "fork": os.fork,
        "a program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "a signal": lambda: (os.kill(parent, 0), "sent"),
        "limits of the parent": lambda: __import__("resource").prlimit(parent, 7),
        "privileges": lambda: (os.setuid(0), "root"),
        "typing on the terminal": lambda: __import__("fcntl").ioctl(2, 0x5412, b"x"),
    }
    had = {}
    for name, attempt in tried.items():
        with contextlib.suppress(OSError):
            if (got := attempt()) is not None:
                had[name] = str(got)[:100]
    return had


def test_a_process_that_scores_can_do_nothing_but_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "k")
    (tmp_path / "secret").write_text("s")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        workers = Workers(__name__, "attempts", processes=1, deadline_s=60.0)
        assert asyncio.run(workers(os.getpid(), str(tmp_path), port)) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_process_that_scores_ends_with_the_one_that_started_it() -> None:
    worker = [sys.executable, "-c", "from forge_rl.rewards.workers import main; main('json', 'dumps', '60')"]
    starts = f"import subprocess; subprocess.run({worker!r})"
    with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None, "which stays open, and would keep the process"
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert select.select([parent.stdout], [], [], 10)[0], "it still runs"
        assert parent.stdout.read() == b""


ONE_LAYER = """
import os, socket, sys
from forge_rl.rewards import confinement
setattr(confinement, sys.argv[1], lambda *_: None)
confinement.confine([])
folder = sys.argv[2]
for name, attempt in {
    "read": lambda: open(f"{folder}/secret"),
    "list": lambda: os.listdir(folder),
    "new file": lambda: open(f"{folder}/new", "x"),
    "old file": lambda: open(f"{folder}/secret", "a"),
    "truncate": lambda: os.open(f"{folder}/secret", os.O_TRUNC),
    "network": lambda: socket.socket(),
    "Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "signal": lambda: os.kill(os.getppid(), 0),
    "priority": lambda: os.nice(1),
}.items():
    try:
        attempt()
    except OSError:
        print(name)
"""


@pytest.mark.parametrize(
    ("lacking", "refused"),
    [
        (
            "_restrict_reading",
            ["new file", "old file", "truncate", "network", "Unix socket", "signal", "priority"],
        ),
        ("_filter_calls", ["read", "list", "new file", "old file"]),
    ],
)
def test_seccomp_and_landlock_each_refuse_their_part_without_the_other(
    lacking: str, refused: list[str], tmp_path: Path
) -> None:
    if missing_confinement():
        pytest.skip(missing_confinement())
    (tmp_path / "secret").write_text("s")
    done = subprocess.run(
        [sys.executable, "-c", ONE_LAYER, lacking, str(tmp_path)], capture_output=True, text=True, check=False
    )
    found = done.stdout.splitlines()
    if lacking == "_filter_calls":
        found = [each for each in found if each not in ("truncate", "signal")]  # of later versions of Landlock alone
    assert (found, done.stderr) == (refused, "")


@pytest.mark.parametrize(
    ("landlock", "error", "said"),
    [
        (4, errno.EFAULT, ""),
        (-1, errno.EFAULT, "without Landlock, which blocks reading files: this kernel"),
        (4, errno.EINVAL, "without seccomp, which blocks the network"),
        (-1, errno.ENOSYS, "writing files and without Landlock"),
    ],
)
def test_a_kernel_that_confines_less_is_told_of(landlock: int, error: int, said: str, monkeypatch: pytest.MonkeyPatch):
    class Kernel:
        def prctl(self, *asked: object) -> int:
            ctypes.set_errno(error)
            return -1

        def syscall(self, *asked: object) -> int:
            return landlock

    before = missing_confinement()
    assert Path("/proc/self/status").read_text().count("Seccomp:\t0"), "asking confines nobody"
    monkeypatch.setattr("forge_rl.rewards.confinement._libc", Kernel)
    assert said in missing_confinement()
    assert bool(missing_confinement()) == bool(said)
    monkeypatch.undo()
    assert missing_confinement() == before


def babbles(what: str) -> object:
    """Answer as a process does that somebody else has taken over."""
    if what == "pid":
        return os.getpid()
    for file in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(file, {"garbage": b"]]\n", "long": b"1" * 200_000, "deep": b"[" * 60_000 + b"\n"}[what])
    time.sleep(60)
    return None


async def test_what_makes_no_sense_costs_its_answer_alone():
    workers = Workers(__name__, "babbles", processes=1, deadline_s=30.0)
    for what in ("garbage", "long", "deep"):
        assert await workers(what) is None
    assert isinstance(await workers("pid"), int)


async def test_a_process_that_others_killed_between_calls_costs_no_answer():
    workers = Workers(__name__, "babbles", processes=1, deadline_s=30.0)
    first = await workers("pid")
    assert isinstance(first, int)
    os.kill(first, 9)
    second = await workers("pid")
    assert isinstance(second, int)
    assert second != first


async def test_processes_that_others_killed_cost_no_answer_however_many(monkeypatch: pytest.MonkeyPatch):
    workers = Workers(__name__, "babbles", processes=2, deadline_s=30.0)
    first, second = await asyncio.gather(workers("pid"), workers("pid"))
    for pid in (first, second):
        assert isinstance(pid, int)
        os.kill(pid, 9)
    assert isinstance(await workers("pid"), int), "both were idle, and the answer had reached neither"

    start = Workers._start

    async def killed(self: Workers) -> asyncio.subprocess.Process:
        process = await start(self)
        process.kill()
        return process

    monkeypatch.setattr(Workers, "_start", killed)
    with pytest.raises(InfrastructureError, match="killed from outside 2 times"):
        await Workers(__name__, "babbles", processes=1, deadline_s=30.0)("pid")


def exhausts(limit: str) -> int:
    """Need more than a process may have."""
    return len(bytearray(1 << 40)) if limit == "memory" else exhausts(limit) + 1


async def test_an_answer_that_exceeds_the_limits_is_wrong_and_not_unscored():
    workers = Workers(__name__, "exhausts", processes=1, deadline_s=30.0)
    assert [await workers("memory"), await workers("depth")] == [None, None]


def keeps(blocks: list[bytearray] = []) -> int:  # noqa: B006
    blocks.append(bytearray(1 << 30))  # its pages are never written
    return len(blocks)


async def test_memory_that_earlier_answers_took_costs_no_later_one() -> None:
    workers = Workers(__name__, "keeps", processes=1, deadline_s=30.0)
    assert None not in [await workers() for _ in range(6)]
