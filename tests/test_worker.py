"""Workers under another interpreter: calls side by side, cancelled ones, processes that die with all they started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from forge_rl.envs.worker import Worker
from forge_rl.errors import ConfigError, ForgeError, ReplicaError
from forge_rl.system.interpreters import interpreter
from tests.fake_backend import until
from tests.processes import lives

SCRIPT = """
import asyncio, json, subprocess, sys
print("a line for the log", file=sys.stderr, flush=True)
if sys.argv[1:] == ["broken"]:
    sys.exit("it lacks a module")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
def say(line): print(json.dumps(line), flush=True)
async def main():
    tasks, loop = {}, asyncio.get_running_loop()
    async def answer(call):
        if call["do"] == "fail":
            return say({"id": call["id"], "error": "no such task"})
        if call["do"] == "wait":
            try:
                await asyncio.sleep(1000)
            finally:
                print("cancelled", call["id"], file=sys.stderr, flush=True)
        say({"id": call["id"], "result": child.pid if call["do"] == "child" else call["do"]})
    say({"id": 0})
    while line := await asyncio.to_thread(sys.stdin.readline):
        call = json.loads(line)
        if "cancel" in call:
            tasks[call["cancel"]].cancel()
        else:
            tasks[call["id"]] = asyncio.create_task(answer(call))
asyncio.run(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return [sys.executable, str(path)]


async def test_calls_go_side_by_side_and_errors_are_told(script: list[str], tmp_path: Path, nothing_left: None):
    worker = await Worker.start("w", script, log=tmp_path / "log")
    waiting = asyncio.ensure_future(worker.call({"do": "wait"}))
    assert await asyncio.gather(*(worker.call({"do": str(number)}) for number in range(9))) == list("012345678")
    with pytest.raises(ForgeError, match="no such task"):
        await worker.call({"do": "fail"})
    waiting.cancel()
    await until(lambda: "cancelled 1" in (tmp_path / "log").read_text())
    await worker.close()
    assert not worker.alive
    assert "a line for the log" in (tmp_path / "log").read_text()


async def test_a_worker_for_which_the_machine_has_no_room_is_the_error_of_its_start(script: list[str], tmp_path: Path):
    (tmp_path / "full").touch()
    with pytest.raises(ForgeError, match=r"w cannot be started: .*File exists"):
        await Worker.start("w", script, log=tmp_path / "full" / "log")


async def test_a_worker_that_is_killed_ends_its_calls_and_all_that_it_started(
    script: list[str], tmp_path: Path, nothing_left: None
):
    worker = await Worker.start("w", script, log=tmp_path / "log")
    child = await worker.call({"do": "child"})
    assert isinstance(child, int)
    assert lives(child)
    waiting = asyncio.ensure_future(worker.call({"do": "wait"}))
    await asyncio.sleep(0)
    os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
    with pytest.raises(ReplicaError, match=r"killed by signal 9\na line for the log"):
        await waiting
    with pytest.raises(ReplicaError):
        await worker.call({"do": "1"})
    await until(lambda: not lives(child))


@pytest.mark.parametrize(
    ("arguments", "message"), [(["broken"], "exited with status 1\na line for the log\nit lacks a module"), ([], "")]
)
async def test_a_worker_that_does_not_start_says_why(
    script: list[str], tmp_path: Path, nothing_left: None, arguments: list[str], message: str
):
    command = [*script, *arguments] if message else [sys.executable, "-c", "import time; time.sleep(1000)"]
    expected = message or "was not ready after 0.5 s"
    with pytest.raises(ForgeError, match=expected):
        await Worker.start("w", command, log=tmp_path / "log", deadline_s=60 if message else 0.5)


def test_an_interpreter_is_named_or_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: object):
    assert interpreter(["anything"], python=sys.executable) == Path(sys.executable)
    with pytest.raises(ConfigError, match="no interpreter /nowhere/python"):
        interpreter(["anything"], python="/nowhere/python")
    program = tmp_path / "uv"
    # A uv that makes a venv of nothing, and cannot install what is called `lost`.
    program.write_text(
        '#!/bin/sh\ncase "$*" in *lost*) echo "no registry" >&2; exit 2;; esac\n'
        'if [ "$1" = venv ]; then echo made >> "$(dirname $0)/calls"; mkdir -p "$4/bin"; '
        'ln -s /bin/sh "$4/bin/python"; fi\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    cache = tmp_path / "cache"
    first = interpreter(["one"], cache=cache)
    assert (interpreter(["one"], cache=cache), first.name, first.exists()) == (first, "python", True)
    assert interpreter(["two"], cache=cache) != first
    assert (tmp_path / "calls").read_text() == "made\nmade\n"
    for _ in range(2):  # what failed is not taken for made
        with pytest.raises(ConfigError, match="with lost:\nno registry") as caught:
            interpreter(["lost"], cache=cache)
        assert "python=PATH" in caught.value.hint
