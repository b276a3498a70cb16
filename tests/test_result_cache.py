"""The cache of results: equal calls run once, also among processes; it is bounded, and damage costs nothing else."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_rl.system.result_cache import ResultCache, _ResultFile, content_key

FILE = "results-1.sqlite"


class Work:
    """Counts how often it runs."""

    def __init__(self, text: str = "x", *, keep: bool = True, error: Exception | None = None) -> None:
        self.text, self.keep, self.error, self.runs = text, keep, error, 0
        self.go_on = asyncio.Event()

    async def __call__(self) -> tuple[str, bool]:
        self.runs += 1
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return self.text, self.keep


async def get(cache: ResultCache, number: int, text: str = "x" * 100) -> bool:
    """Look a key up, and keep a text if it is not there; returns whether it was."""

    async def compute() -> tuple[str, bool]:
        return text, True

    return (await cache.get(content_key(number), compute))[1]


async def test_equal_calls_run_one_and_later_processes_and_runs_find_its_result(tmp_path: Path):
    work, cache = Work("é\ud800"), ResultCache(tmp_path / "cache")
    calls = [asyncio.create_task(cache.get(content_key(1), work)) for _ in range(9)]
    await asyncio.sleep(0)
    calls[5].cancel()  # that one waits for another
    work.go_on.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [result for result in results if isinstance(result, tuple)] == [("é\ud800", False)] + [("é\ud800", True)] * 7
    assert await cache.get(content_key(1), work) == ("é\ud800", True)
    cache.close()
    later = ResultCache(tmp_path / "cache")
    assert await later.get(content_key(1), work) == ("é\ud800", True)
    assert work.runs == 1
    assert (dict(cache.counts), dict(later.counts)) == ({"ran": 1, "joined": 7, "memory": 1}, {"file": 1})
    assert (tmp_path / "cache").stat().st_mode & 0o77 == (tmp_path / "cache" / FILE).stat().st_mode & 0o77 == 0
    later.close()


async def test_a_forgotten_result_is_not_read_from_a_file_that_still_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go_on, write = threading.Event(), _ResultFile._write

    def slow(file: _ResultFile, *args: Any) -> None:
        assert go_on.wait(30)
        write(file, *args)

    first = ResultCache(tmp_path)
    await get(first, 1)
    first.close()
    monkeypatch.setattr(_ResultFile, "_write", slow)
    cache = ResultCache(tmp_path)
    assert await get(cache, 1)
    cache.forget(content_key(1))
    assert not await get(cache, 1), "it is run again"
    go_on.set()
    cache.close()
    later = ResultCache(tmp_path)
    assert await get(later, 1), "the new one is kept"
    later.forget(content_key(1))
    later.close()
    last = ResultCache(tmp_path)
    assert not await get(last, 1)
    last.close()


@pytest.mark.parametrize(
    "work", [lambda: Work(keep=False), lambda: Work(error=OSError("gone")), lambda: Work("x" * 99)]
)
async def test_what_fails_is_too_large_or_is_not_to_be_kept_is_run_by_each(work: Callable[[], Work], tmp_path: Path):
    compute, cache = work(), ResultCache(tmp_path, value_bytes=98)
    calls = [asyncio.create_task(cache.get(content_key(1), compute)) for _ in range(3)]
    await asyncio.sleep(0)
    compute.go_on.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert compute.runs == 3
    cache.close()


async def test_a_cancelled_call_leaves_the_work_to_one_that_waits_for_it(tmp_path: Path):
    work, cache = Work(), ResultCache(tmp_path)
    first, second = [asyncio.create_task(cache.get(content_key(1), work)) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    work.go_on.set()
    assert await second == ("x", False)
    assert work.runs == 2
    cache.close()


async def test_the_least_recently_used_results_are_evicted(tmp_path: Path):
    cache = ResultCache(tmp_path, most_bytes=20_000, memory_bytes=0)
    for number in range(300):
        await get(cache, number)
        if number > 20:
            assert await get(cache, 7)
        if number % 10 == 0:  # a batch of writes is one use
            cache.close()
    cache.close()
    with sqlite3.connect(tmp_path / FILE) as database:
        total, counted_bytes, rows = database.execute(
            "select sum(bytes), (select bytes from total), count(*) from results"
        ).fetchone()
    assert total == counted_bytes <= 20_000
    assert rows > 60
    assert [await get(cache, number) for number in (299, 290, 7, 0, 30)] == [True, True, True, False, False]
    cache.close()


def garbage(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def other_values(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("update results set value = cast('no' as blob)")


def no_table(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("drop table results")


@pytest.mark.filterwarnings("ignore:(the cache|results)")
@pytest.mark.parametrize("while_open", [False, True])
@pytest.mark.parametrize("damage", [garbage, cut, other_values, no_table])
async def test_a_damaged_file_costs_its_results_only(damage: Callable[[Path], None], while_open: bool, tmp_path: Path):
    async def main() -> None:
        cache = ResultCache(tmp_path, memory_bytes=0)
        for number in range(200):
            await get(cache, number)
        cache.close()
        if while_open:
            assert await get(cache, 0)
        damage(tmp_path / FILE)
        assert not all([await get(cache, number) for number in range(200)])
        cache.close()
        if damage is no_table and while_open:
            return  # the next one mends it
        after = ResultCache(tmp_path, memory_bytes=0)
        assert all([await get(after, number) for number in range(200)])
        after.close()

    await main()


@pytest.mark.filterwarnings("ignore:results of tools are kept in memory only")
async def test_a_folder_that_cannot_be_used_costs_no_call(tmp_path: Path):
    (tmp_path / "file").touch()
    cache = ResultCache(tmp_path / "file" / "folder")
    assert [await get(cache, 1), await get(cache, 1)] == [False, True]


_PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from forge_rl.system.result_cache import ResultCache, content_key

async def compute():
    with open(sys.argv[2], "a") as file:
        file.write("ran\\n")
    print("running", flush=True)
    await asyncio.sleep(float(sys.argv[3]))
    return "x", True

async def main():
    cache = ResultCache(Path(sys.argv[1]))
    print("started", flush=True)
    print((await cache.get(content_key("slow"), compute))[1], flush=True)
    cache.close()

asyncio.run(main())
"""


def test_equal_calls_of_processes_run_once_unless_the_first_dies(tmp_path: Path):
    ran = tmp_path / "ran"

    def start(seconds: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "cache"), str(ran), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    first = start(600)
    assert [first.stdout.readline() for _ in range(2)] == ["started\n", "running\n"]
    processes = [start(0.3) for _ in range(2)]
    ready, at_once = processes[0].stdout, processes[1].stdout
    assert [stream.readline() for stream in (ready, at_once)] == ["started\n"] * 2
    assert ran.read_text() == "ran\n"
    os.kill(first.pid, signal.SIGKILL)
    texts = sorted([ready.read(), at_once.read()])
    assert texts == ["True\n", "running\nFalse\n"]
    assert ran.read_text() == "ran\n" * 2
    for process in (first, *processes):
        process.wait()
        process.stdout.close()
