"""Jobs: the flag --job, and hosts that are processes of this machine."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.flags.texts import parse, written
from forge_rl.jobs.local import LocalJob
from forge_rl.jobs.process import ProcessHosts
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import Job, JobListener, ReplacingJob
from forge_rl.runtime.joining import last_line
from tests.fake_actors import hosts_of
from tests.processes import lives


def test_a_job_is_named_by_its_kind_and_options():
    assert build_job("local") == LocalJob()
    assert build_job("process:4") == build_job("process:hosts=4") == ProcessHosts(hosts=4)
    for text, problem in (
        ("slurmy", "unknown kind of job 'slurmy'"),
        ("process:0", "--job process:hosts is 0"),
        ("process:four", "hosts is 'four'"),
        ("process:nodes=2", "process has no option 'nodes'"),
        ("local:2", "local has no options"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_job(text)


def test_a_table_of_a_config_file_is_a_text_of_the_flag(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[job]\nkind = "process"\nhosts = 3\n')
    command = [sys.executable, "-m", "recipes.grpo", "--config", str(tmp_path / "run.toml"), "--dry-run"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    assert [line.split()[0] for line in process.stdout.splitlines()] == ["hosts:", "local", "host0", "host1", "host2"]

    odd = {"nodes": 2, "setup": "source env.sh, x=y", "exclusive": True, "time": "1:00:00"}
    parsed = parse(written("slurm", odd), "--job", bundled=["slurm"], takes_weight=False)
    assert parsed.raw_params == {"nodes": "2", "setup": "source env.sh, x=y", "exclusive": "true", "time": "1:00:00"}


async def test_a_host_whose_process_ends_is_reported_by_name():
    job = build_job("process:2")
    assert isinstance(job, Job)
    losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    async with job.open(JobListener(on_lost=lambda *loss: losses.put_nowait(loss))) as hosts:
        assert list(hosts) == ["host0", "host1"]
        os.kill(hosts_of(os.getpid())["host1"], signal.SIGKILL)
        lost_host = await asyncio.wait_for(losses.get(), 60)
        assert losses.empty()
    assert losses.empty(), "hosts that are given back are not lost"
    name, cause = lost_host
    assert name == "host1"
    assert "ended" in cause


async def test_a_host_that_cannot_join_says_why_and_one_that_is_given_back_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "logs").mkdir()
    job = build_job("process:2,most_replaced=1")
    assert isinstance(job, ReplacingJob)

    async def main() -> tuple[str, int]:
        cause = await job.replace("host1.1", tmp_path, lambda _: None)
        # The real command would end by itself, on a busy machine before it is given back.
        sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        monkeypatch.setattr("forge_rl.jobs.process.join_command", lambda *_: sleeps)
        started: asyncio.Queue[str] = asyncio.Queue()
        replacing = asyncio.create_task(job.replace("host1.2", tmp_path, started.put_nowait))
        pid = int((await started.get()).split()[1])
        assert lives(pid)
        replacing.cancel()
        await asyncio.wait([replacing])
        return cause, pid

    cause, pid = await main()
    assert cause == f"its process exited with status 1: error: {tmp_path} is not a run folder"
    assert not lives(pid)


def test_the_last_line_of_a_hosts_output_is_short_and_visible(tmp_path: Path) -> None:
    log = tmp_path / "host.log"
    assert last_line(log) == ""
    log.write_text("began\nerror: no \x1b]0;owned\x07 place\nended " + "x" * 1000 + "\n\n")
    assert last_line(log) == r": error: no \x1b]0;owned\x07 place"
    log.write_text("ended " + "x" * 1000)
    assert len(last_line(log)) == 302
