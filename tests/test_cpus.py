"""Cores that this process may use, in containers whose files are written out here."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from forge_rl.sandbox import Pool, shared
from forge_rl.system import cgroups
from forge_rl.system.cpus import cpu_cores


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cgroups; this process may run on eight cores."""
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "_MEMBERSHIPS", tmp_path / "memberships")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 2), ("1000 100000", 1)]
)
def test_a_containers_quota_of_cpu_time_counts(folder: Path, quota: str, cores: int):
    (folder / "cpu.max").write_text(f"{quota}\n")
    assert cpu_cores() == cores
    (folder / "cpu.max").unlink()
    (folder / "cpu").mkdir()
    for name, value in zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), quota.split(), strict=True):
        (folder / "cpu" / name).write_text(value.replace("max", "-1"))
    assert cpu_cores() == cores


def test_the_least_quota_of_a_job_and_its_processes_counts_but_not_more_than_there_are_cores(folder: Path):
    (folder / "memberships").write_text("0::/slurm/job_7\n")
    assert cpu_cores() == 8
    for path, quota in (("slurm", "1600000 100000"), ("slurm/job_7", "max 100000")):
        (folder / path).mkdir()
        (folder / path / "cpu.max").write_text(quota)
    assert cpu_cores() == 8
    (folder / "slurm" / "cpu.max").write_text("300000 100000")
    assert cpu_cores() == 3


def test_only_the_cores_on_which_this_process_may_run_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= cpu_cores() <= len(before)


async def test_a_pool_of_sandboxes_has_the_cores_and_the_memory_of_its_container(folder: Path):
    (folder / "cpu.max").write_text("200000 100000")
    (folder / "memory.max").write_text(str(512 << 20))
    (folder / "memory.current").write_text(str(112 << 20))
    (folder / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    pool = Pool()
    assert pool.most == 100, "four MiB for each session"
    assert pool._num_servers == 2
    assert pool._settings.memory_bytes == (300 << 20) // 2
    cpus = shared._PoolEntry(cast(Any, None), cast(Any, None)).cpus
    await cpus.acquire()
    assert not cpus.locked()
    await cpus.acquire()
    assert cpus.locked()
